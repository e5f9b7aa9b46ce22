"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures keep their shape, a token stands for a square of patches."""

import math
from collections.abc import Sequence
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
from preprocess.schema import ItemTensors


def _num_patches(outputs: Outputs) -> torch.Tensor:
    return torch.as_tensor(outputs["image_grid_thw"]).prod(-1)


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
    return [(high * square, most // high * square)]


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

QWEN2_VL = ProcessorFamily(processor_class="Qwen2VLProcessor", modalities={"image": _IMAGE})
QWEN2_5_VL = ProcessorFamily(processor_class="Qwen2_5_VLProcessor", modalities={"image": _IMAGE})
QWEN3_VL = ProcessorFamily(processor_class="Qwen3VLProcessor", modalities={"image": _IMAGE})
