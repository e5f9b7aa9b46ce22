"""Turns a stream of token ids into text. Incomplete characters and beginnings of stop strings are held back."""

from collections.abc import Callable, Sequence
from typing import Any

MAX_DECODED_TOKENS = 16
"""The most earlier tokens that are decoded together with a new one, and the most tokens held back for an incomplete
character."""
_WINDOW_TOKENS = 4
"""The tokens decoded again with each new one, while each completes a character. A smaller window is not faster."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[list[int]], str]


def decoder_of(tokenizer: Any, *, skip_special_tokens: bool = True) -> Decode:
    """Returns a function that turns token ids into text by a Hugging Face tokenizer: by a fast one directly, because
    transformers' wrapper takes longer than decoding a few tokens."""
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        decode = tokenizer.backend_tokenizer.decode
        return lambda token_ids: str(decode(token_ids, skip_special_tokens))
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Builds the output text of one sequence token by token. A token costs the same at any length of the text."""

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        min_tokens: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        """`decode`: from `decoder_of`.
        `min_tokens`: stop strings completed by one of the first `min_tokens` tokens do not count.
        `before`: the tokens of a text that the output continues. The output is the text of all tokens without the text
        of `before`: some tokenizers drop the space at the start of a text, and `before` may end within a character."""
        self._decode = decode
        self._stop = stop
        self._includes_stop = includes_stop
        self._token_ids = _last_with_text(decode, before)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        text = decode(self._token_ids) if self._token_ids else ""
        # `_text`: the text of the tokens from `_anchor` to `_boundary`, whole characters that were returned already.
        self._anchor, self._text = 0, text.rstrip(_BROKEN)
        self._boundary = len(self._token_ids)
        while self._text != text and not self._text.startswith(decode(self._token_ids[: self._boundary])):
            self._boundary -= 1
        self._broken_before = text[len(self._text) :]
        """Broken characters at the end of `before`. If the next token does not complete them, they are not output."""
        self._held_back = ""
        self.num_chars = 0
        """The number of characters so far. Characters held back or cut off count; an incomplete character does not."""
        self.stopped_by: str | None = None
        """The stop string that is complete."""

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    @property
    def unfinished(self) -> list[int]:
        """Returns the last tokens, which complete no character. Tokens of `before` may be among them."""
        return self._token_ids[self._boundary :]

    @property
    def num_chars_before(self) -> int:
        """The number of broken characters of `before` at the start of the `unfinished` tokens' text."""
        return len(self._broken_before)

    def tells(self, token_id: int) -> bool:
        """Returns whether the token adds any text; most special tokens do not."""
        return _tells(self._decode, token_id)

    def append(self, token_ids: list[int]) -> str:
        """Returns the text that `token_ids` complete, and sets `stopped` at a complete stop string. The text then ends
        before it, or after it with `includes_stop`. Tokens are always decoded one by one, because some decoders decode
        a broken character differently when more tokens follow it."""
        text = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self._token_ids.append(token_id)
            self._num_tokens += 1
            text += self._release(self._decode_new())
        return text

    def flush(self) -> str:
        """Returns the text still held back. Call this once, at the end of a sequence that was not `stopped`."""
        tail = self._decode_new(final=True)
        text = self._release(tail) + self._held_back
        self._held_back = ""
        return text

    def _decode_new(self, *, final: bool = False) -> str:
        told, text = self._text, self._decode(self._token_ids[self._anchor :])
        if not text.startswith(told):
            # A broken character changed the characters before it, which were returned already. Decode it without them.
            self._anchor, self._text, told = self._boundary, "", ""
            text = self._decode(self._token_ids[self._anchor :])
        num_held = len(self._token_ids) - self._boundary
        if text.endswith(_BROKEN) and not final and num_held <= MAX_DECODED_TOKENS:
            return ""
        is_long = len(self._token_ids) - self._anchor > _WINDOW_TOKENS
        if is_long and text == told:
            # Tokens without text, such as skipped special tokens, must not become the new anchor: the next word would
            # then start a text, and some decoders drop the space at the start.
            del self._token_ids[self._boundary :]
        elif is_long:
            # The new anchor is the last boundary, never a token inside a character, which some decoders would garble.
            self._anchor = self._boundary
            self._text = self._decode(self._token_ids[self._anchor :])
        else:
            self._text = text
        self._boundary = len(self._token_ids)
        new, self._broken_before = text[len(told) :].removeprefix(self._broken_before), ""
        self.num_chars += len(new)
        return new

    def _release(self, new_text: str) -> str:
        if not self._stop:
            return new_text
        text = self._held_back + new_text
        if self._num_tokens > self._min_tokens and (found := self._first_stop(text)) is not None:
            start, end = found
            self.stopped_by, self._held_back = text[start:end], ""
            return text[: end if self._includes_stop else start]
        keep = max(overlap(text, stop) for stop in self._stop)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str) -> tuple[int, int] | None:
        """Returns start and end in `text` of the stop string that completes first, or None. Only stop strings that end
        in the new part of `text` count, so that the result does not depend on how the tokens are batched."""
        starts = [(text.find(stop, max(0, len(self._held_back) + 1 - len(stop))), len(stop)) for stop in self._stop]
        found = [(start, start + length) for start, length in starts if start >= 0]
        return min(found, key=lambda place: (place[1], place[0]), default=None)


def _tells(decode: Decode, token_id: int) -> bool:
    # Twice, because some decoders drop the space at the start of a text, and the token may be a space.
    return bool(decode([token_id, token_id]))


def _last_with_text(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """Returns the shortest tail of `token_ids` whose text starts with a whole character, so that it decodes the same
    alone. Skips tokens without text, such as a picture's thousands of placeholders."""
    found: list[int] = []
    silent = set[int]()
    for token_id in reversed(token_ids):
        if token_id in silent:
            continue
        if not _tells(decode, token_id):
            silent.add(token_id)
            continue
        found.insert(0, token_id)
        text = decode(found)
        if (text and not text.startswith(_BROKEN)) or len(found) == MAX_DECODED_TOKENS:
            break
    return found


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
