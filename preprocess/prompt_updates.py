"""Puts media items into prompts: applies each model family's replacements and insertions to token ids.

Every prompt arrives as token ids. An item in it is a short target (one placeholder token) or nothing at all. The
updates work on ids, so a prompt as text and the same prompt as ids give the same result. An item's thousands of tokens
are tokenised once, not with every prompt."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

import numpy as np

from raylens.preprocess.prompt_tokenizer import Opening, Piece, PromptTokenizer, Slot, TokenIds
from raylens.preprocess.schema import InvalidRequestError, ItemExpansion, PlaceholderRange

Item: TypeAlias = tuple[str, ItemExpansion]
"""An item's modality and expansion. Sequences of items hold those of one modality in prompt order."""


class Position(Enum):
    """The place of an insertion. START: before everything. AFTER_PREFIX: after the tokenizer's own BOS, if it adds one.
    AFTER_ITEMS: after the last item, or before everything without items. END: at the very end."""

    START = "start"
    AFTER_PREFIX = "after_prefix"
    AFTER_ITEMS = "after_items"
    END = "end"


@dataclass(frozen=True, slots=True)
class PromptReplacement:
    """The modality's i-th item replaces the i-th `target` in the prompt.

    `target`: either special tokens, which are searched by their ids, or ordinary text, which is searched in the
    prompt's text across token bounds. `otherwise`: the place of all items, in order, in a prompt without targets. None:
    such a prompt is rejected."""

    target: str
    otherwise: Position | None = None


@dataclass(frozen=True, slots=True)
class PromptInsertion:
    """The modality's items go, in order, to one place.

    `tokenized_apart`: the prompt's text is tokenised as if without the items."""

    position: Position
    tokenized_apart: bool = False


PromptUpdate: TypeAlias = PromptReplacement | PromptInsertion


@dataclass(frozen=True, slots=True)
class FrameInsertion:
    """Text that the model expects in every prompt outside of items, e.g. a separator at the end.

    `with_items_only`: not for prompts without items. `unless_there`: not for prompts that already start with it."""

    text: str
    position: Position
    with_items_only: bool = False
    unless_there: bool = False


@dataclass(frozen=True, slots=True)
class PromptRules:
    """All updates of one model: `updates` by modality, and the `frame` outside of items."""

    updates: dict[str, PromptUpdate]
    frame: tuple[FrameInsertion, ...] = ()


def apply_updates(
    ids: TokenIds,
    items: Sequence[Item],
    rules: PromptRules,
    tokenizer: PromptTokenizer,
    *,
    may_be_expanded: bool = True,
) -> tuple[TokenIds, list[PlaceholderRange]]:
    """Expands a prompt for `items`. Returns the final ids and each item's placeholder range.

    With `may_be_expanded`, ids that already hold the expansions stay the same: the client ran the model's processor
    itself. Raises InvalidRequestError if the prompt's targets do not match the items."""
    offsets = _find_expanded(ids, items, rules, tokenizer) if may_be_expanded and items else None
    if offsets is None:
        pieces = _framed(_place_items(ids, items, rules, tokenizer), bool(items), rules, tokenizer)
        ids, offsets = tokenizer.join(pieces, [expansion for _, expansion in items])
    features = [expansion.features for _, expansion in items]
    return ids, [replace(one, offset=offset + one.offset) for one, offset in zip(features, offsets, strict=True)]


def _find_expanded(
    ids: TokenIds, items: Sequence[Item], rules: PromptRules, tokenizer: PromptTokenizer
) -> list[int] | None:
    """Returns the offset of each item's `token_ids` if the prompt holds all of them and no other target, else None."""
    offsets = _find_in_prompt_order(ids, items, tokenizer)
    if offsets is None:
        return None
    for update in rules.updates.values():
        target = _target_ids(update.target, tokenizer) if isinstance(update, PromptReplacement) else None
        if target is not None:
            # Counts targets in the items of all modalities, because two modalities may share a token.
            num_in_items = sum(len(_find_all(one.token_ids, target)) for _, one in items)
            if len(_find_all(ids, target)) != num_in_items:
                return None
    return offsets


def _find_in_prompt_order(ids: TokenIds, items: Sequence[Item], tokenizer: PromptTokenizer) -> list[int] | None:
    """Returns the offset of each item's `token_ids`, or None if the prompt does not hold all of them.

    The search goes from left to right, so that no item is found inside another one: a frame of a video may look like a
    picture. If several items match at one place, the longest wins; among equally long ones, the item whose own text
    precedes the place."""
    haystack = _searchable(ids)
    waiting: dict[str, deque[int]] = {}
    for index, (modality, _) in enumerate(items):
        waiting.setdefault(modality, deque()).append(index)
    offsets = [-1] * len(items)
    end = 0
    while waiting:
        for queue in waiting.values():
            if offsets[queue[0]] < end:
                offsets[queue[0]] = haystack.find(_searchable(items[queue[0]][1].token_ids), end)
                if offsets[queue[0]] < 0:
                    return None
        found = [(offsets[queue[0]], items[queue[0]][1], modality) for modality, queue in waiting.items()]
        if len(found) > 1:
            found.sort(
                key=lambda one: (one[0], -len(one[1].token_ids), -_length_before(ids, one[0], one[1], tokenizer))
            )
        offset, expansion, modality = found[0]
        end = offset + len(expansion.token_ids)
        waiting[modality].popleft()
        if not waiting[modality]:
            del waiting[modality]
    return offsets


def _length_before(ids: TokenIds, offset: int, expansion: ItemExpansion, tokenizer: PromptTokenizer) -> int:
    """Returns the length of the item's own text before `offset`, or -1 if other text is there."""
    num_tokens = len(expansion.before.encode())  # a token is at least a byte long
    text = tokenizer.decode(ids[max(0, offset - num_tokens) : offset])
    return len(expansion.before) if text.endswith(expansion.before) else -1


def _place_items(ids: TokenIds, items: Sequence[Item], rules: PromptRules, tokenizer: PromptTokenizer) -> list[Piece]:
    """Returns the prompt cut at its targets, with a Slot for every item."""
    prefix, rest = tokenizer.split_prefix(ids)
    pieces: list[Piece] = [prefix, Opening(rest)]
    for modality, update in rules.updates.items():
        slots = [Slot(index) for index, (name, _) in enumerate(items) if name == modality]
        if isinstance(update, PromptInsertion):
            pieces = _insert(pieces, slots, update.position)
            if slots and update.tokenized_apart:
                pieces = [Opening(one.ids, stays_first=True) if isinstance(one, Opening) else one for one in pieces]
            continue
        cut = [part for piece in pieces for part in _cut(piece, update.target, tokenizer)]
        num_targets = sum(part is None for part in cut)
        if num_targets == 0 and update.otherwise is not None:
            pieces = _insert(pieces, slots, update.otherwise)
        elif num_targets != len(slots):
            reason = f"the prompt has {num_targets} {modality} placeholders for {len(slots)} {modality} items"
            raise InvalidRequestError(reason, field="messages", code="placeholder_mismatch")
        elif num_targets:
            remaining = iter(slots)
            pieces = [next(remaining) if part is None else part for part in cut]
    return pieces


def _cut(piece: Piece, target: str, tokenizer: PromptTokenizer) -> list[Piece | None]:
    """Returns the parts of a piece, with None in place of each target."""
    if isinstance(piece, str | Slot):
        return [piece]
    is_opening = isinstance(piece, Opening)
    ids = piece.ids if isinstance(piece, Opening) else piece
    target_ids = _target_ids(target, tokenizer)
    if target_ids is None:
        parts = _cut_text(ids, target, is_opening, tokenizer)
    else:
        parts, end = [], 0
        for start in _find_all(ids, target_ids):
            parts += [ids[end:start], None]
            end = start + len(target_ids)
        parts.append(ids[end:])
    if is_opening and isinstance(parts[0], np.ndarray):
        parts[0] = Opening(parts[0])
    return parts


def _cut_text(ids: TokenIds, target: str, is_opening: bool, tokenizer: PromptTokenizer) -> list[Piece | None]:
    """Returns the ids cut where their *text* has `target`, with None in place of each target. A run with a target is
    returned as text, because the target's first and last token may hold letters of adjacent text."""
    parts: list[Piece | None] = []
    start = end = 0  # the ids that follow the last part
    for index, run in enumerate(tokenizer.runs(ids)):
        # Runs and boundaries alternate.
        text = tokenizer.decode_run(run, is_first=is_opening and index == 0) if index % 2 == 0 and len(run) else ""
        if target in text:
            parts.append(ids[start:end])
            for part in text.split(target):
                parts += [part, None]
            parts.pop()
            start = end + len(run)
        end += len(run)
    return [*parts, ids[start:]]


def _insert(pieces: list[Piece], inserted: Sequence[Piece], position: Position) -> list[Piece]:
    index = {
        Position.START: 0,
        Position.AFTER_PREFIX: next(i for i, piece in enumerate(pieces) if isinstance(piece, Opening)),
        Position.AFTER_ITEMS: max((i + 1 for i, piece in enumerate(pieces) if isinstance(piece, Slot)), default=0),
        Position.END: len(pieces),
    }[position]
    return [*pieces[:index], *inserted, *pieces[index:]]


def _framed(pieces: list[Piece], has_items: bool, rules: PromptRules, tokenizer: PromptTokenizer) -> list[Piece]:
    for insertion in rules.frame:
        content = tokenizer.content(insertion.text)
        is_unwanted = insertion.unless_there and _opens_with(pieces, content[1])
        if not is_unwanted and (has_items or not insertion.with_items_only):
            pieces = _insert(pieces, content, insertion.position)
    return pieces


def _opens_with(pieces: list[Piece], ids: TokenIds) -> bool:
    for piece in pieces:
        opening = piece.ids if isinstance(piece, Opening) else piece
        if not isinstance(opening, np.ndarray):
            return False
        if len(opening):
            return np.array_equal(opening[: len(ids)], ids)
    return False


def _target_ids(target: str, tokenizer: PromptTokenizer) -> TokenIds | None:
    """Returns the ids to search for, or None for a text whose tokens depend on adjacent text.

    Raises ValueError for a target that mixes ordinary text and tokens."""
    before, ids, after = tokenizer.content(target)
    if not before and not after:
        return ids
    if len(ids):
        raise ValueError(f"the target {target!r} is neither text nor tokens but both")
    return None


def _searchable(ids: TokenIds) -> str:
    """Returns a string with one character for each id, because Python searches strings in linear time."""
    return ids.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def _find_all(ids: TokenIds, part: TokenIds) -> list[int]:
    """Returns the offsets of `part` in `ids`, without overlaps."""
    if len(part) == 1:
        return np.flatnonzero(ids == part[0]).tolist()
    haystack, needle = _searchable(ids), _searchable(part)
    found, start = [], haystack.find(needle)
    while start >= 0:
        found.append(start)
        start = haystack.find(needle, start + len(needle))
    return found
