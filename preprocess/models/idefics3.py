"""Idefics3 and SmolVLM: a picture is cut into tiles, each with its own mark, and a small view of the whole."""

import torch

from preprocess.field_layout import Flat, Outputs
from preprocess.models.family import (
    HFProcessor,
    Kwargs,
    Modality,
    ProcessorFamily,
    Size,
    image_token,
    replaces_image_token,
    run_nested_images,
)


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

IDEFICS3 = ProcessorFamily(processor_class="Idefics3Processor", modalities={"image": _IMAGE})
SMOLVLM = ProcessorFamily(processor_class="SmolVLMProcessor", modalities={"image": _IMAGE})
