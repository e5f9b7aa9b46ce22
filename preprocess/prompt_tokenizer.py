"""Wraps the model's tokenizer for prompts with media: inserted text is tokenised as if the whole prompt were one text.

A tokenizer first cuts a text at its special tokens, then merges the text between two of them, called a *run* here.
Inserting text into a prompt of token ids therefore changes only the runs that the text is inserted into.
`PromptTokenizer.join` does this."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from raylens.preprocess.schema import ItemExpansion

TokenIds: TypeAlias = npt.NDArray[np.int32]
"""Token ids of shape (num_tokens,)."""


def token_ids(ids: Iterable[int]) -> TokenIds:
    return np.fromiter(ids, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of item `index` in a prompt under construction."""

    index: int


@dataclass(frozen=True, slots=True)
class Opening:
    """The first ids of a prompt, tokenised as the start of a text (some tokenizers add a space there).

    `stays_first`: the ids stay the same even if something is inserted before them."""

    ids: TokenIds
    stays_first: bool = False


Piece: TypeAlias = TokenIds | Opening | Slot | str
"""A part of a prompt under construction: fixed ids, the place of an item, or ordinary text to be tokenised."""


class PromptTokenizer:
    """Wraps a Hugging Face tokenizer. `boundaries`: further tokens that cut a text, besides its special ones."""

    def __init__(self, tokenizer: Any, boundaries: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        contents = {*special, *boundaries}
        longest_first = sorted(contents, key=len, reverse=True)
        self._boundary_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        ids = tokenizer.convert_tokens_to_ids(longest_first)
        self._boundary_ids = dict(zip(longest_first, ids, strict=True))
        self._is_boundary = np.zeros(max(len(tokenizer), *ids, 0) + 1, dtype=np.bool_)
        self._is_boundary[ids] = True
        self._anchor = self._find_anchor(longest_first)
        self._added_space = ""
        self._added_space = self.decode_run(self.encode_run("a", is_first=False), is_first=False).removesuffix("a")
        self.prefix, self.suffix = _added_around(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool, is_marked: bool = False) -> TokenIds:
        """Returns the ids of a whole prompt.

        `is_marked`: the text comes from a chat template filled with marked user text. Marked control tokens are
        tokenised as ordinary text."""
        if not is_marked:
            return token_ids(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        ids = token_ids(encode_marked_chat(self._tokenizer, text))
        return np.concatenate([self.prefix, ids, self.suffix]) if add_special_tokens else ids

    def split_prefix(self, ids: TokenIds) -> tuple[TokenIds, TokenIds]:
        """Returns the tokenizer's own prefix, empty if `ids` do not begin with it, and the rest."""
        size = len(self.prefix)
        return (ids[:size], ids[size:]) if np.array_equal(ids[:size], self.prefix) else (ids[:0], ids)

    def without_special_tokens(self, ids: TokenIds) -> TokenIds:
        """Returns `ids` without the tokenizer's own prefix and suffix."""
        _, ids = self.split_prefix(ids)
        size = len(self.suffix)
        return ids[: len(ids) - size] if size and np.array_equal(ids[-size:], self.suffix) else ids

    def decode(self, ids: TokenIds) -> str:
        """Returns the text of ids at the start of a prompt."""
        text: str = self._tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        return text

    def token_id(self, token: str) -> int:
        """Returns the id of `token`. Raises ValueError if the tokenizer has no such token."""
        found = self._tokenizer.convert_tokens_to_ids(token)
        if found is None or found == self._tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no token {token!r}")
        return int(found)

    def content(self, text: str) -> tuple[str, TokenIds, str]:
        """Returns a text cut at its first and last boundary: ordinary text, token ids, ordinary text."""
        before, *parts = self._boundary_pattern.split(text)
        after = parts.pop() if parts else ""
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2 == 0:
                ids.append(self._boundary_ids[part])
            elif part:
                ids += self.encode_run(part, is_first=False).tolist()
        return before, token_ids(ids), after

    def runs(self, ids: TokenIds) -> list[TokenIds]:
        """Returns `ids` cut into alternating runs and boundaries of one id each. Runs have even indices."""
        cuts = self.boundaries(ids)
        return np.split(ids, np.stack([cuts, cuts + 1], axis=1).ravel())

    def text_of_run(self, run: TokenIds, *, is_first: bool) -> str | None:
        """Returns the text of a run, or None if tokenising that text would not give the run back."""
        decoded = self.decode_run(run, is_first=is_first)
        # Decoding may have removed a space at the start of the text.
        for text in (decoded, " " + decoded):
            if np.array_equal(self.encode_run(text, is_first=is_first), run):
                return text
        return None

    def decode_run(self, run: TokenIds, *, is_first: bool) -> str:
        if is_first:
            return self.decode(run)
        anchor, anchor_ids = self._anchor
        text = self.decode(token_ids([*anchor_ids, *run.tolist()]))
        # Llama 2's tokenizers add a space before every run, and remove only the first one in decoding.
        return text.removeprefix(anchor).removeprefix(self._added_space)

    def encode_run(self, text: str, *, is_first: bool) -> TokenIds:
        """Returns the ids of a run of text: within a prompt, or at its start if `is_first`. Boundary tokens spelled out
        in the text are tokenised as ordinary text."""
        anchor, anchor_ids = ("", ()) if is_first else self._anchor
        if self._boundary_pattern.search(text):
            ids = encode_marked_chat(self._tokenizer, anchor + mark_control_tokens(text, self._boundary_pattern))
        else:
            ids = self._tokenizer(anchor + text, add_special_tokens=False)["input_ids"]
        assert tuple(ids[: len(anchor_ids)]) == anchor_ids
        return token_ids(ids[len(anchor_ids) :])

    def join(self, pieces: Sequence[Piece], items: Sequence[ItemExpansion]) -> tuple[TokenIds, list[int]]:
        """Joins the pieces of a prompt. Returns its ids and the offset of each item's `token_ids`.

        Text merges with adjacent runs as if the whole prompt had been tokenised at once. A run that the tokenizer would
        not produce, which only a client's ids can contain, keeps its ids. Takes time linear in the prompt's length."""
        writer = _PromptWriter(self)
        offsets = [0] * len(items)
        for piece in pieces:
            if isinstance(piece, str):
                writer.add_text(piece)
            elif isinstance(piece, Slot):
                item = items[piece.index]
                writer.add_text(item.before)
                offsets[piece.index] = writer.add_fixed(item.token_ids)
                writer.add_text(item.after)
            elif isinstance(piece, Opening):
                writer.add_opening(piece)
            else:
                writer.add_ids(piece)
        return writer.finish(), offsets

    def boundaries(self, ids: TokenIds) -> npt.NDArray[np.intp]:
        """Returns the indices of the boundaries in `ids`. Ids unknown to the tokenizer are no boundaries."""
        return np.flatnonzero(self._is_boundary.take(ids, mode="clip"))

    def _find_anchor(self, contents: Sequence[str]) -> tuple[str, tuple[int, ...]]:
        """Returns text and id of a token that never changes the tokens of a text after it."""
        for token in self._tokenizer.added_tokens_decoder.values():
            if token.content in contents and not (token.rstrip or token.lstrip):
                ids = self._tokenizer(token.content, add_special_tokens=False)["input_ids"]
                if len(ids) == 1:
                    return token.content, tuple(ids)
        raise ValueError("the tokenizer has no special token that leaves the text after it alone")


@dataclass(frozen=True, slots=True)
class _RunOfIds:
    """Ids within a run. `was_first`: whether they were tokenised as the start of a text."""

    ids: TokenIds
    was_first: bool = False


class _PromptWriter:
    """Writes a prompt's ids. The last run is held back, because later text may merge with it."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._done: list[TokenIds] = []
        self._num_done = 0
        self._start = 0  # the offset of the text's start
        self._run: list[_RunOfIds | str] = []

    def add_text(self, text: str) -> None:
        if text:
            self._run.append(text)

    def add_fixed(self, ids: TokenIds) -> int:
        """Adds ids that merge with nothing. Returns their offset."""
        self._flush()
        offset = self._num_done
        self._write(ids)
        return offset

    def add_ids(self, ids: TokenIds, *, was_first: bool = False) -> None:
        found = self._tokenizer.boundaries(ids)
        start, end = (found[0], found[-1] + 1) if len(found) else (len(ids), len(ids))
        if start:
            self._run.append(_RunOfIds(ids[:start], was_first))
        if start < end:
            self.add_fixed(ids[start:end])
            if end < len(ids):
                self._run.append(_RunOfIds(ids[end:]))

    def add_opening(self, opening: Opening) -> None:
        if opening.stays_first:
            self._flush()
            self._start = self._num_done
        self.add_ids(opening.ids, was_first=True)

    def finish(self) -> TokenIds:
        self._flush()
        return np.concatenate(self._done) if self._done else token_ids(())

    def _write(self, ids: TokenIds) -> None:
        self._done.append(ids)
        self._num_done += len(ids)

    def _is_first(self) -> bool:
        """Returns whether the run starts a text: only the tokenizer's own prefix may precede it."""
        if self._num_done == self._start:
            return True
        prefix = self._tokenizer.prefix
        return self._num_done == len(prefix) and np.array_equal(np.concatenate(self._done), prefix)

    def _flush(self) -> None:
        """Writes the run. Its ids stay the same, unless they are next to text, or they started a text and no longer
        do."""
        run, self._run = self._run, []
        is_first = self._is_first()
        if all(isinstance(part, _RunOfIds) and part.was_first <= is_first for part in run):
            for part in run:
                assert isinstance(part, _RunOfIds)
                self._write(part.ids)
            return
        text = ""
        for part in run:
            part_text, is_first = (part, is_first) if isinstance(part, str) else self._text_of(part, is_first)
            if part_text is not None:
                text += part_text
                continue
            assert isinstance(part, _RunOfIds)
            self._write(self._tokenizer.encode_run(text, is_first=is_first))
            self._write(part.ids)
            text, is_first = "", False
        self._write(self._tokenizer.encode_run(text, is_first=is_first))

    def _text_of(self, part: _RunOfIds, is_first: bool) -> tuple[str | None, bool]:
        """Returns the text of ids, or None if no text yields them, and whether their run starts a text."""
        if part.was_first:
            text = self._tokenizer.text_of_run(part.ids, is_first=True)
            if text is not None:
                return text, is_first
        # The template may contain BOS, and the ids after it were then not tokenised as the start of a text.
        text = self._tokenizer.text_of_run(part.ids, is_first=False)
        return text, is_first and not (part.was_first and text is not None)


def _added_around(tokenizer: Any) -> tuple[TokenIds, TokenIds]:
    """Returns the ids that the tokenizer adds before and after every text (BOS, EOS)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return token_ids(special[:start]), token_ids(special[start + len(plain) :])
    return token_ids(()), token_ids(())
