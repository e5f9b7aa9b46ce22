"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures keep their shape, a token stands for a square of patches."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from preprocess.field_layout import Batched, Flat, Outputs
from preprocess.models.family import (
    HFProcessor,
    Kwargs,
    Modality,
    Option,
    ProcessorFamily,
    Size,
    checked_int,
    image_token,
    replaces_image_token,
    run_images,
)
from preprocess.models.video import FIXED_FRAMES, size_metadata
from preprocess.schema import ItemTensors


def _num_patches(outputs: Outputs) -> torch.Tensor:
    return torch.as_tensor(outputs["image_grid_thw"]).prod(-1)


def _num_clip_patches(outputs: Outputs) -> torch.Tensor:
    return torch.as_tensor(outputs["video_grid_thw"]).prod(-1)


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    patch = processor.image_processor.patch_size
    square = patch * processor.image_processor.merge_size
    resized = smart_resize(height, width, square, **_pixel_limits(processor, kwargs))
    return {"image_grid_thw": torch.tensor([[1, resized[0] // patch, resized[1] // patch]])}


def _pixel_limits(processor: HFProcessor, kwargs: Kwargs) -> dict[str, int]:
    size = processor.image_processor.size
    return {
        "min_pixels": kwargs.get("min_pixels", size["shortest_edge"]),
        "max_pixels": kwargs.get("max_pixels", size["longest_edge"]),
    }


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """The rectangle of squares that fills the limit of pixels best, at most 100 times as wide as high."""
    square = processor.image_processor.patch_size * processor.image_processor.merge_size
    most = _pixel_limits(processor, kwargs)["max_pixels"] // square**2
    high = max(range(math.isqrt(most // 100) + 1, math.isqrt(most) + 1), key=lambda high: most // high * high)
    # A picture of one row gets as wide as its shape, whatever the limit.
    return [(high * square, most // high * square), (square, math.isqrt(most * 100) * square)]


def _option(name: str) -> Option:
    """`min_pixels` and `max_pixels` of a resized picture, within what the model is set to."""

    def parse(processor: HFProcessor, value: object) -> Kwargs:
        limits = _pixel_limits(processor, {})
        pixels = checked_int(name, value, least=limits["min_pixels"], most=limits["max_pixels"])
        return {name: pixels}

    return parse


def _drop_second_frame(processor: HFProcessor, tensors: ItemTensors) -> ItemTensors:
    """A picture is a video of two equal frames to these models: keeps one, (num_patches, 3 x patch x patch)."""
    patches, size = tensors["pixel_values"], 3 * processor.image_processor.patch_size**2
    if patches.shape[-1] == size:
        return tensors
    return {**tensors, "pixel_values": patches.view(len(patches), 3, 2, -1)[:, :, 0].flatten(1)}


def _repeat_frame(processor: HFProcessor, tensors: ItemTensors) -> ItemTensors:
    patches = tensors["pixel_values"].view(len(tensors["pixel_values"]), 3, 1, -1)
    return {**tensors, "pixel_values": patches.expand(-1, -1, 2, -1).flatten(1)}


def _run(processor: HFProcessor, images: Sequence[Any], kwargs: Kwargs) -> Outputs:
    kwargs = dict(kwargs)
    limits = _pixel_limits(processor, kwargs)
    kwargs.pop("min_pixels", None)
    kwargs.pop("max_pixels", None)
    size = {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}
    # The second frame is not even made.
    return run_images(processor, images, {**kwargs, "size": size, "temporal_patch_size": 1})


_IMAGE = Modality(
    fields={"pixel_values": Flat(_num_patches), "image_grid_thw": Batched()},
    update=replaces_image_token,
    embed_token=image_token,
    size_outputs=_size_outputs,
    largest=_largest,
    language_fields=("image_grid_thw",),
    options={"min_pixels": _option("min_pixels"), "max_pixels": _option("max_pixels")},
    run=_run,
    pack=_drop_second_frame,
    unpack=_repeat_frame,
)


def _clip_outputs(processor: HFProcessor, num_frames: int, height: int, width: int, kwargs: Kwargs) -> Outputs:
    part = processor.video_processor
    num_patches = part.get_num_of_video_patches(num_frames, height, width, {})
    num_steps = -(-num_frames // part.temporal_patch_size)
    # Only the product of the last two matters for the expansion.
    grid = torch.tensor([[num_steps, 1, num_patches // num_steps]])
    return {"video_grid_thw": grid, "video_metadata": [size_metadata(num_frames)]}


def _largest_clip(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """As many frames as are ever sampled, each at the limit of pixels; Qwen3 bounds all frames together."""
    part = processor.video_processor
    square = part.patch_size * part.merge_size
    side = math.isqrt(part.size["longest_edge"]) // square * square
    return [(part.max_frames, side, side), (part.max_frames, square, square)]


_VIDEO = replace(
    FIXED_FRAMES,
    fields={"pixel_values_videos": Flat(_num_clip_patches), "video_grid_thw": Batched()},
    size_outputs=_clip_outputs,
    largest=_largest_clip,
    language_fields=("video_grid_thw",),
)
_MODALITIES = {"image": _IMAGE, "video": _VIDEO}

QWEN2_VL = ProcessorFamily(processor_class="Qwen2VLProcessor", modalities=_MODALITIES)
QWEN2_5_VL = ProcessorFamily(processor_class="Qwen2_5_VLProcessor", modalities=_MODALITIES)
QWEN3_VL = ProcessorFamily(processor_class="Qwen3VLProcessor", modalities=_MODALITIES)
