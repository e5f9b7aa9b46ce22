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


def decoder_of(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Decode:
    """Token ids to text, past what transformers does around it: that takes longer than the decoding of a few
    tokens."""
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        decode = tokenizer.backend_tokenizer.decode
        return lambda token_ids: str(decode(token_ids, skip_special_tokens))
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """The output text of one sequence, grown token by token. Decoding a token costs the same at any length."""

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        min_tokens: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        """Takes `decoder_of` the tokenizer. A stop string that is complete with one of the first `min_tokens` tokens is
        text like any other. `before`: tokens of a text that this one goes on: some tokenizers drop the blank that opens
        a text."""
        self._decode = decode
        self._stop = stop
        self._includes_stop = includes_stop
        self._token_ids = _whole_end(decode, before)
        self._min_tokens = min_tokens + len(self._token_ids)
        # Of the tokens from `_anchor` on, up to `_boundary`, `_text` is what has been told: whole characters.
        self._anchor, self._boundary = 0, len(self._token_ids)
        self._text = decode(self._token_ids) if self._token_ids else ""
        self._held_back = ""
        self.num_chars = 0
        """Of the text so far, what is held back and cut off among it, without a character that is unfinished."""
        self.stopped = False

    @property
    def is_whole(self) -> bool:
        """Whether the last token ended with the end of a character."""
        return self._boundary == len(self._token_ids)

    def tells(self, token_id: int) -> bool:
        """Whether the token is text by itself; special tokens mostly are not."""
        return bool(self._decode([token_id]))

    def append(self, token_ids: list[int]) -> str:
        """Returns the text that `token_ids` make certain; sets `stopped` when a stop string is complete.

        What follows a stop string is not part of the text, nor is, unless `includes_stop`, the stop string. One token
        after the other, however many come together: some decoders make something else of broken characters when more
        is behind them.
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
        self.num_chars += len(text) - len(told)
        return text[len(told) :]

    def _release(self, new_text: str) -> str:
        if not self._stop:
            return new_text
        text = self._held_back + new_text
        if len(self._token_ids) > self._min_tokens and (found := self._first_stop(text)) is not None:
            self.stopped = True
            self._held_back = ""
            start, end = found
            return text[: end if self._includes_stop else start]
        keep = max(overlap(text, stop) for stop in self._stop)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str) -> tuple[int, int] | None:
        """Where the stop string begins and ends that is complete first, in what is new of `text`: that choice does not
        depend on how many tokens come at once."""
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, len(self._held_back) + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return start, end


def _whole_end(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """The fewest of the last of `token_ids` that make whole characters; none where that takes many."""
    for number in range(1, min(len(token_ids), MAX_DECODED_TOKENS // 2) + 1):
        end = list(token_ids[-number:])
        text = decode(end)
        if text and "\N{REPLACEMENT CHARACTER}" not in text:
            return end
    return []


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
