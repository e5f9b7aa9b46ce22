"""LLaVA-NeXT and LLaVA-OneVision: embeddings are in the order of the picture's rows, and a mark ends each row."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality, row_shapes
from raylens.encoder.models.pixels import by_tile, count_patches, joined_tiles
from raylens.preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    pixels, _ = joined_tiles(items, "pixel_values")
    sizes = torch.stack([item["image_sizes"] for item in items])
    return list(model.get_image_features(pixel_values=pixels, image_sizes=sizes).pooler_output)


def _encode_onevision(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Encodes pictures that are all tiled or all untiled.

    The model treats the single picture of a prompt as tiled. Tiled pictures are therefore passed as prompts of one
    picture each, untiled ones as one prompt of two or more."""
    pixels, _ = joined_tiles(items, "pixel_values")
    sizes = torch.stack([item["image_sizes"] for item in items])
    num_images = [1] * len(items) if _is_tiled(items[0]) else [max(2, len(items))]
    features = model.get_image_features(pixel_values=pixels, image_sizes=sizes, batch_num_images=num_images)
    return list(features.pooler_output)


def _is_tiled(item: ItemTensors) -> bool:
    return int(item["batch_num_images"]) == 1


def _encode_clips(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Encodes all clips as one and splits the rows, because every frame has the same number of rows. A mark ends each
    clip."""
    frames, counts = joined_tiles(items, "pixel_values_videos")
    (rows,) = model.get_video_features(pixel_values_videos=frames[None]).pooler_output
    features, mark = rows[:-1], rows[-1:]
    rows_per_frame = len(features) // len(frames)
    return [torch.cat((own, mark)) for own in features.split([count * rows_per_frame for count in counts])]


def _join_clips(stretches: list[torch.Tensor]) -> torch.Tensor:
    """Joins stretches of a clip and keeps the mark of the last one only."""
    return torch.cat([*(frames[:-1] for frames in stretches[:-1]), stretches[-1]])


_PROJECTOR = ("model.multi_modal_projector", "model.image_newline")

LLAVA_NEXT = VisionFamily(
    whole="LlavaNextForConditionalGeneration",
    projector=_PROJECTOR,
    modalities={
        "image": VisionModality(
            encode=_encode, num_patches=count_patches("pixel_values"), on_host=frozenset({"image_sizes"})
        )
    },
    has_tiles=True,
)
LLAVA_ONEVISION = VisionFamily(
    whole="LlavaOnevisionForConditionalGeneration",
    projector=_PROJECTOR,
    modalities={
        "image": VisionModality(
            encode=_encode_onevision,
            num_patches=count_patches("pixel_values"),
            batch_key=lambda item: (_is_tiled(item), row_shapes(item)),
            on_host=frozenset({"image_sizes", "batch_num_images"}),
        ),
        "video": VisionModality(
            encode=_encode_clips,
            num_patches=count_patches("pixel_values_videos"),
            division=replace(by_tile("pixel_values_videos"), join=_join_clips),
        ),
    },
    has_tiles=True,
)
