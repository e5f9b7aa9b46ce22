"""Idefics3 and SmolVLM: a picture becomes tiles, each with its own mark, and a small view of the whole."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from raylens.preprocess.field_layout import Batched, Flat, Outputs
from raylens.preprocess.models.family import (
    HFProcessor,
    Kwargs,
    Modality,
    ProcessorFamily,
    Size,
    blank_pixels,
    image_token,
    replaces_image_token,
    run_nested_images,
)
from raylens.preprocess.models.video import FIXED_FRAMES, clip_options, size_metadata


def _num_tiles(outputs: Outputs) -> torch.Tensor:
    tiles = torch.tensor(outputs["rows"][0]) * torch.tensor(outputs["cols"][0])
    return tiles + 1


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    _, rows, cols = processor.image_processor.get_number_of_image_patches(height, width, dict(kwargs))
    return {"rows": [[rows]], "cols": [[cols]]}


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    longest = (kwargs.get("size") or processor.image_processor.size)["longest_edge"]
    return [(longest, longest)]


_IMAGE = Modality(
    fields={"pixel_values": Flat(_num_tiles, axis=1), "pixel_attention_mask": Flat(_num_tiles, axis=1)},
    update=replaces_image_token,
    embed_token=image_token,
    size_outputs=_size_outputs,
    largest=_largest,
    run=run_nested_images,
)


def _clip_outputs(processor: HFProcessor, num_frames: int, height: int, width: int, kwargs: Kwargs) -> Outputs:
    return {"pixel_values": blank_pixels(1, num_frames), "video_metadata": [size_metadata(num_frames)]}


def _most_frames(processor: HFProcessor) -> int:
    """Returns the most sampled frames, which checkpoints call `max_frames`."""
    return int(processor.video_processor.num_frames)


def _longest_clip(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    return [(min(_most_frames(processor), kwargs["max_frames"]), 336, 336)]


def _num_frames(outputs: Outputs, index: int) -> Sequence[int]:
    return [len(outputs["pixel_values"][index])]


# Frames take the same token as tiles.
_VIDEO = replace(
    FIXED_FRAMES,
    fields={"pixel_values": Batched(_num_frames), "pixel_attention_mask": Batched(_num_frames)},
    embed_token=image_token,
    size_outputs=_clip_outputs,
    largest=_longest_clip,
    options=clip_options(_most_frames),
)

IDEFICS3 = ProcessorFamily(processor_class="Idefics3Processor", modalities={"image": _IMAGE})
SMOLVLM = ProcessorFamily(processor_class="SmolVLMProcessor", modalities={"image": _IMAGE, "video": _VIDEO})
