"""Token ids to text as they come, never half a character and never the beginning of a stop string."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

# So many tokens are decoded with each new one, at most, where each completes a character.
MAX_DECODED_TOKENS = 16

Decode = Callable[[list[int]], str]


class Tokenizer(Protocol):
    """What is used here of a Hugging Face tokenizer."""

    is_fast: bool
    clean_up_tokenization_spaces: bool

    @property
    def backend_tokenizer(self) -> Any: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def decoder_of(tokenizer: Tokenizer) -> Decode:
    """Token ids to text without special tokens, past what transformers does around it: that takes longer than the
    decoding of a few tokens."""
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        decode: Decode = tokenizer.backend_tokenizer.decode  # its default is to skip special tokens
        return decode
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)


class Detokenizer:
    """The output text of one sequence, grown token by token. Decoding a token costs the same at any length."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        """Takes `decoder_of` the tokenizer."""
        self._decode = decode
        self._stop = stop
        self._token_ids: list[int] = []
        # Of the tokens from `_anchor` on, up to `_boundary`, `_text` is what has been told: whole characters.
        self._anchor = self._boundary = 0
        self._text = ""
        self._held_back = ""
        self.stopped = False

    def append(self, token_ids: list[int]) -> str:
        """Returns the text that `token_ids` make certain; sets `stopped` when a stop string is complete.

        A stop string and what follows it are not part of the text. One token after the other, however many come
        together: some decoders make something else of broken characters when more is behind them.
        """
        text = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self._token_ids.append(token_id)
            text += self._release(self._decode_new())
        return text

    def flush(self) -> str:
        """Returns what was still held back; call once at the end of a sequence that was not `stopped`."""
        tail = self._decode_new(final=True)
        text = self._release(tail) + self._held_back
        self._held_back = ""
        return text

    def _decode_new(self, *, final: bool = False) -> str:
        told, text = self._text, self._decode(self._token_ids[self._anchor :])
        if not text.startswith(told):
            # A broken character has spoilt whole ones before it, which have been told: it is decoded without them.
            self._anchor, self._text, told = self._boundary, "", ""
            text = self._decode(self._token_ids[self._anchor :])
        num_held = len(self._token_ids) - self._boundary
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not final and num_held <= MAX_DECODED_TOKENS:
            return ""
        if len(self._token_ids) - self._anchor > MAX_DECODED_TOKENS:
            # From the last boundary on: never from inside a character, which some decoders spoil wholly.
            self._anchor = self._boundary
            self._text = self._decode(self._token_ids[self._anchor :])
        else:
            self._text = text
        self._boundary = len(self._token_ids)
        return text[len(told) :]

    def _release(self, new_text: str) -> str:
        if not self._stop:
            return new_text
        text = self._held_back + new_text
        found = [index for index in (text.find(stop) for stop in self._stop) if index >= 0]
        if found:
            self.stopped = True
            self._held_back = ""
            return text[: min(found)]
        keep = max(overlap(text, stop) for stop in self._stop)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
