"""Cuts a prompt from the left without cutting through an item: an item across the cut is removed with its marks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raylens.preprocess.prompt_tokenizer import TokenIds
from raylens.preprocess.schema import PlaceholderRange


@dataclass(frozen=True, slots=True)
class Extent:
    """The half-open range of one item's prompt positions: its tokens and the marks around them."""

    start: int
    end: int


def truncate_left(
    ids: TokenIds, placeholders: Sequence[PlaceholderRange], extents: Sequence[Extent], limit: int
) -> tuple[TokenIds, list[PlaceholderRange], list[int]]:
    """Returns the last `limit` tokens or fewer, the placeholders in them, and the indices of these placeholders' items.

    Extents may be in any order. Adjacent extents may share a token with marks of both."""
    cut = max(0, len(ids) - limit)
    for extent in sorted(extents, key=lambda extent: extent.start):
        if extent.start < cut < extent.end:
            cut = extent.end
    kept = [index for index, extent in enumerate(extents) if extent.start >= cut]
    return ids[cut:], [replace(placeholders[index], offset=placeholders[index].offset - cut) for index in kept], kept
