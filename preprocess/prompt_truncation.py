"""Cuts a prompt from the left. Items stay whole: an item that the cut would go through is removed with its marks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from preprocess.prompt_tokenizer import TokenIds
from preprocess.schema import PlaceholderRange


@dataclass(frozen=True, slots=True)
class Extent:
    """Half-open range of the prompt positions that are there for one item: its tokens, and marks around them."""

    start: int
    end: int


def truncate_left(
    ids: TokenIds, placeholders: Sequence[PlaceholderRange], extents: Sequence[Extent], limit: int
) -> tuple[TokenIds, list[PlaceholderRange], list[int]]:
    """The last `limit` tokens or fewer, the placeholders in them, and which of the items these are.

    Extents do not overlap; they may be in any order.
    """
    cut = max(0, len(ids) - limit)
    for extent in extents:
        if extent.start < cut < extent.end:
            cut = extent.end
            break
    kept = [index for index, extent in enumerate(extents) if extent.start >= cut]
    return ids[cut:], [replace(placeholders[index], offset=placeholders[index].offset - cut) for index in kept], kept
