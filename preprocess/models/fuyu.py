"""Fuyu has no vision tower: rows of raw patches, each with a newline token at its end, then BOS, precede the text."""

import math
from typing import Any

import torch

from raylens.preprocess.field_layout import Outputs, whole
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, Size
from raylens.preprocess.prompt_updates import FrameInsertion, Position, PromptInsertion


def _expansion(processor: HFProcessor, outputs: Outputs, kwargs: Kwargs) -> str:
    patch, target = processor.image_processor.patch_size, processor.image_processor.size
    unpadded = {"height": outputs["image_unpadded_heights"], "width": outputs["image_unpadded_widths"]}
    rows, cols = (
        min(math.ceil(int(own[0][0]) / patch[side]), target[side] // patch[side]) for side, own in unpadded.items()
    )
    return str((processor.image_token * cols + processor.image_newline_token) * rows + "<s>")


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    target = processor.image_processor.size
    scale = min(target["height"] / height, target["width"] / width, 1.0)
    return {"image_unpadded_heights": [[int(height * scale)]], "image_unpadded_widths": [[int(width * scale)]]}


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    return [(processor.image_processor.size["height"], processor.image_processor.size["width"])]


def _mend(processor: HFProcessor) -> None:
    """Replaces `patchify_image`, because the Pillow back end's version fails on its own processor's tensors. The
    replacement is set on the class, because an object's attributes are part of the processor's identity."""
    if processor.image_processor.backend == "pil":
        type(processor.image_processor).patchify_image = _patchify


def _patchify(image_processor: Any, image: torch.Tensor, patch_size: Any) -> torch.Tensor:
    """Takes (batch, 3, height, width), returns (batch, num_patches, patch x patch x 3), row by row."""
    high, wide = patch_size["height"], patch_size["width"]
    patches = torch.as_tensor(image).unfold(2, high, high).unfold(3, wide, wide)
    return patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)


FUYU = ProcessorFamily(
    processor_class="FuyuProcessor",
    modalities={
        "image": Modality(
            fields={"image_patches": whole},
            update=lambda processor: PromptInsertion(Position.START, tokenized_apart=True),
            feature_tokens=lambda processor: (processor.image_newline_token,),
            size_outputs=_size_outputs,
            largest=_largest,
            expansion=_expansion,
            max_items=1,
        )
    },
    # The token at the start of an answer.
    frame=lambda processor: (FrameInsertion("<0x04>", Position.END, with_items_only=True),),
    keeps_special_tokens=False,
    mend=_mend,
)
