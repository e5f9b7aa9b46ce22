"""Turns token ids into text as they come. It never returns half a character or the beginning of a stop string."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

MAX_DECODED_TOKENS = 16
"""At most so many tokens and the newest one are decoded together. Of tokens that complete no character so many are
held back."""
_WINDOW_TOKENS = 4
"""So many are decoded again with each new one while each completes a character. Fewer save no more time."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[list[int]], str]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer's interface that this module uses."""

    is_fast: bool
    clean_up_tokenization_spaces: bool

    @property
    def backend_tokenizer(self) -> Any: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def decoder_of(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Decode:
    """Returns a function that turns token ids into text.

    Where it can it calls the fast tokenizer directly: what transformers does around that call takes longer than the
    decoding of a few tokens."""
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
        """`decode`: what `decoder_of` returns for the tokenizer.
        `min_tokens`: a stop string that is complete with one of the first `min_tokens` tokens is text like any other.
        `before`: the tokens of a text that the output continues. The output is then what these tokens' text lacks of
        the text of all tokens. Some tokenizers drop the blank at the beginning of a text, and `before` may end within a
        character."""
        self._decode = decode
        self._stop = stop
        self._includes_stop = includes_stop
        self._token_ids = _last_with_text(decode, before)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        text = decode(self._token_ids) if self._token_ids else ""
        # `_text` is the text of the tokens from `_anchor` to `_boundary`: whole characters, not to be returned again.
        self._anchor, self._text = 0, text.rstrip(_BROKEN)
        self._boundary = (
            len(self._token_ids) if self._text == text else _num_within(decode, self._token_ids, self._text)
        )
        self._broken_before = text[len(self._text) :]
        """Broken characters at the end of the text before. The next token completes them, or they are not the
        output's."""
        self._held_back = ""
        self.num_chars = 0
        """The number of characters of the text so far. Characters that are held back or cut off count, an unfinished
        character does not."""
        self.stopped = False

    @property
    def unfinished(self) -> list[int]:
        """Returns the last tokens that complete no character, those of the text before included."""
        return self._token_ids[self._boundary :]

    @property
    def num_chars_before(self) -> int:
        """The number of broken characters at the beginning of the `unfinished` tokens' text that belong to the text
        before."""
        return len(self._broken_before)

    def tells(self, token_id: int) -> bool:
        """Returns whether the token adds any text; most special tokens do not."""
        return _tells(self._decode, token_id)

    def append(self, token_ids: list[int]) -> str:
        """Returns the text that `token_ids` make certain, and sets `stopped` when a stop string is complete.

        The text ends before the stop string, or behind it with `includes_stop`. The tokens are decoded one after the
        other, however many come together, because some decoders decode a broken character differently when more tokens
        follow it.
        """
        text = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self._token_ids.append(token_id)
            self._num_tokens += 1
            text += self._release(self._decode_new())
        return text

    def flush(self) -> str:
        """Returns the text that is still held back. Call this once, at the end of a sequence that was not `stopped`."""
        tail = self._decode_new(final=True)
        text = self._release(tail) + self._held_back
        self._held_back = ""
        return text

    def _decode_new(self, *, final: bool = False) -> str:
        told, text = self._text, self._decode(self._token_ids[self._anchor :])
        if not text.startswith(told):
            # A broken character has changed the whole characters before it, which have been returned already. So it is
            # decoded without them.
            self._anchor, self._text, told = self._boundary, "", ""
            text = self._decode(self._token_ids[self._anchor :])
        num_held = len(self._token_ids) - self._boundary
        if text.endswith(_BROKEN) and not final and num_held <= MAX_DECODED_TOKENS:
            return ""
        is_long = len(self._token_ids) - self._anchor > _WINDOW_TOKENS
        if is_long and text == told:
            # Tokens without text, such as skipped special tokens, must not become the new anchor. Some decoders drop
            # the blank at the beginning of a text, and the next word would become such a beginning.
            del self._token_ids[self._boundary :]
        elif is_long:
            # The new anchor is the last boundary, never a token inside a character: some decoders would spoil the whole
            # character.
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
            self.stopped = True
            self._held_back = ""
            start, end = found
            return text[: end if self._includes_stop else start]
        keep = max(overlap(text, stop) for stop in self._stop)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str) -> tuple[int, int] | None:
        """Returns where in `text` the stop string begins and ends that is complete first, or None where none is.

        It looks only at stop strings that end in the new part of `text`. The choice does not depend on how many tokens
        come at once."""
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, len(self._held_back) + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return start, end


def _tells(decode: Decode, token_id: int) -> bool:
    # Twice, because some decoders drop the blank at the beginning of a text, and a token may be a blank.
    return bool(decode([token_id, token_id]))


def _last_with_text(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """Returns the last tokens that decode by themselves as behind all others: the fewest that begin with a whole
    character. Leaves out tokens without text, such as the thousands that stand for a picture."""
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


def _num_within(decode: Decode, token_ids: list[int], text: str) -> int:
    """Returns how many of the tokens are within `text`, a beginning of their text."""
    return next(number for number in range(len(token_ids), -1, -1) if text.startswith(decode(token_ids[:number])))


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
