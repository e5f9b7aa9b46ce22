"""Items put together again, as one call of the Hugging Face processor returns them, so that tests compare the two."""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from raylens.preprocess.field_layout import whole
from raylens.preprocess.items import ItemProcessor
from raylens.preprocess.schema import ItemTensors

_AXES = {
    ("Idefics3Processor", "pixel_values"): 1,
    ("Idefics3Processor", "pixel_attention_mask"): 1,
    ("SmolVLMProcessor", "pixel_values"): 1,
    ("SmolVLMProcessor", "pixel_attention_mask"): 1,
    ("MllamaProcessor", "pixel_values"): 1,
    ("MllamaProcessor", "aspect_ratio_ids"): 1,
    ("MllamaProcessor", "aspect_ratio_mask"): 1,
    ("MiniCPMOcrProcessor", "pixel_values"): -1,
    ("MiniCPMV4_6Processor", "pixel_values"): -1,
    ("MiniCPMV4_7Processor", "pixel_values"): -1,
}
"""The axes on which Hugging Face concatenates items, where it is not the first."""


def merged_items(
    processor: ItemProcessor, modality: str, items: Sequence[ItemTensors], *, num_in_prompt: int | None = None
) -> dict[str, torch.Tensor]:
    """The fields as one call of the Hugging Face processor with all `items` returns them."""
    rules = processor.rules(modality, num_in_prompt or len(items))
    unpacked = [rules.unpack(processor._processor, item) for item in items]
    kind = type(processor._processor).__name__
    merged = {}
    for name, part in rules.fields.items():
        values = [item[name] for item in unpacked]
        if name == "image_token_pooling":
            merged[name] = _merged_indices(values)
        elif name == "batch_num_images" and rules is not processor.rules(modality):
            merged[name] = torch.tensor([max(2, len(items))])
        elif part is whole:
            merged[name] = torch.cat(values, dim=_AXES.get((kind, name), 0))
        else:
            # What these masks have for crops and frames that one item lacks beside a larger one.
            fill = 1 if name in ("pixel_attention_mask", "image_attention_mask") else 0
            largest = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
            merged[name] = torch.stack([_pad(value, largest, fill) for value in values])
    return merged


def _merged_indices(items: list[torch.Tensor]) -> torch.Tensor:
    """Molmo 2's indices of patches, counted over all pictures; -1 means none. An item's last patch is always in use."""
    starts = itertools.accumulate((int(item.max()) + 1 for item in items), initial=0)
    return torch.cat([torch.where(item >= 0, item + start, item) for item, start in zip(items, starts, strict=False)])


def _pad(item: torch.Tensor, sizes: Sequence[int], fill: int) -> torch.Tensor:
    # torch's pad counts axes from the last one, and gives (before, after) for each.
    missing = [want - have for want, have in zip(sizes, item.shape, strict=True)]
    return F.pad(item, [width for size in reversed(missing) for width in (0, size)], value=fill)
