"""Items put together again, as one call of the Hugging Face processor returns them: the inverse of
`preprocess/field_layout.py`, by which tests compare the two."""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from raylens.preprocess.field_layout import Batched, FieldLayout, Flat
from raylens.preprocess.items import ItemProcessor
from raylens.preprocess.models.llava_next import NumTogether
from raylens.preprocess.models.molmo2 import PooledPatches, moved
from raylens.preprocess.schema import ItemTensors


def merged_items(
    processor: ItemProcessor, modality: str, items: Sequence[ItemTensors], *, num_in_prompt: int | None = None
) -> dict[str, torch.Tensor]:
    """The fields as one call of the Hugging Face processor with all `items` returns them."""
    rules = processor.rules(modality, num_in_prompt or len(items))
    unpacked = [rules.unpack(processor._processor, item) for item in items]
    # What these masks have for crops and frames that one item lacks beside a larger one.
    fills = {"pixel_attention_mask": 1, "image_attention_mask": 1}
    return {
        name: _merged(layout, [item[name] for item in unpacked], fills.get(name, 0))
        for name, layout in rules.fields.items()
    }


def _merged(layout: FieldLayout, items: list[torch.Tensor], fill: int) -> torch.Tensor:
    if isinstance(layout, Flat):
        return torch.cat(items, dim=layout.axis)
    if isinstance(layout, NumTogether):
        return torch.tensor([max(2, len(items))])
    if isinstance(layout, PooledPatches):
        starts = itertools.accumulate((int(item.max()) + 1 for item in items), initial=0)
        return torch.cat([moved(item, start) for item, start in zip(items, starts, strict=False)])
    assert isinstance(layout, Batched)
    largest = [max(sizes) for sizes in zip(*(item.shape for item in items), strict=True)]
    return torch.stack([_pad(item, largest, fill) for item in items])


def _pad(item: torch.Tensor, sizes: Sequence[int], fill: int) -> torch.Tensor:
    # torch's pad counts axes from the last one, and gives (before, after) for each.
    missing = [want - have for want, have in zip(sizes, item.shape, strict=True)]
    return F.pad(item, [width for size in reversed(missing) for width in (0, size)], value=fill)
