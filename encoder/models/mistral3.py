"""Mistral Small 3.1 and later: Pixtral's tower takes pictures of any shape."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from transformers import PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality, all_together
from raylens.encoder.models.pixels import count_patches
from raylens.preprocess.schema import ItemTensors

_MAX_PADDED = 2
"""The most padded pixels of one call, as a multiple of its pictures' own pixels."""


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Encodes pictures of any sizes, in one or more calls.

    The tower takes pictures padded to one size, drops the patches of padding and packs the rest. Pictures of very
    different sizes go in separate calls, so that padding stays small."""
    return list(chain.from_iterable(_encode_padded(model, group) for group in _groups(items)))


def _groups(items: Sequence[ItemTensors]) -> Iterator[list[ItemTensors]]:
    """Divides the items into runs, each as long as `_MAX_PADDED` allows."""
    group: list[ItemTensors] = []
    for item in items:
        shapes = [one["pixel_values"].shape for one in (*group, item)]
        padded = len(shapes) * max(height for _, height, _ in shapes) * max(width for _, _, width in shapes)
        if padded > _MAX_PADDED * sum(height * width for _, height, width in shapes):
            yield group
            group = []
        group.append(item)
    yield group


def _encode_padded(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    sizes = [tuple(item["image_sizes"].tolist()) for item in items]
    side = model.config.vision_config.patch_size * model.config.spatial_merge_size
    if len(items) == 1 and sizes[0] == (side, side):
        # A call with a single embedding fails, because transformers squeezes the axis of embeddings.
        return _encode_padded(model, [*items, *items])[:1]
    height, width = (max(item["pixel_values"].shape[axis] for item in items) for axis in (1, 2))
    pixels = items[0]["pixel_values"].new_zeros(len(items), 3, height, width)
    for padded, item in zip(pixels, items, strict=True):
        own = item["pixel_values"]
        padded[:, : own.shape[1], : own.shape[2]] = own
    return list(model.get_image_features(pixel_values=pixels, image_sizes=sizes).pooler_output)


MISTRAL3 = VisionFamily(
    whole="Mistral3ForConditionalGeneration",
    modalities={
        "image": VisionModality(
            encode=_encode,
            num_patches=count_patches("pixel_values"),
            batch_key=all_together,
            on_host=frozenset({"image_sizes"}),
        )
    },
    is_packed=True,
)
