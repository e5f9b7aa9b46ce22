"""Molmo 2: a small view of the whole picture, then overlapping crops of it, pooled to one grid of tokens."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from raylens.preprocess.field_layout import Batched, Flat, Outputs
from raylens.preprocess.models.family import (
    HFProcessor,
    Kwargs,
    Modality,
    ProcessorFamily,
    Size,
    int_option,
    replaces_image_token,
)
from raylens.preprocess.models.video import FIXED_FRAMES, size_metadata
from raylens.preprocess.prompt_updates import FrameInsertion, Position


def _num_crops(outputs: Outputs) -> torch.Tensor:
    return torch.as_tensor(outputs["image_num_crops"])


@dataclass(frozen=True, slots=True)
class PooledPatches:
    """The indices of the patches that each token is pooled from, counted over all pictures of a call; -1 means none.

    An item's indices count from its own first patch. Its last patch is always in use, because margins of crops are
    dropped only between crops. The highest index thus gives the start of the next picture's patches.
    """

    def split(self, value: Any, outputs: Outputs, num_items: int) -> list[torch.Tensor]:
        grids = torch.as_tensor(outputs["image_grids"])
        rows = torch.split(torch.as_tensor(value), (grids[:, :2].prod(-1) + grids[:, 2:].prod(-1)).tolist())
        num_patches = _num_crops(outputs) * outputs["pixel_values"].shape[1]
        starts = (num_patches.cumsum(0) - num_patches).tolist()
        return [moved(row, -start) for row, start in zip(rows, starts, strict=True)]


def moved(indices: torch.Tensor, distance: int) -> torch.Tensor:
    return torch.where(indices >= 0, indices + distance, indices)


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    grid, _ = processor.image_processor.get_image_grid_and_crops(height, width, kwargs)
    return {"image_grids": [grid]}


def _clip_outputs(processor: HFProcessor, num_frames: int, height: int, width: int, kwargs: Kwargs) -> Outputs:
    """Returns the outputs for a video. Every frame is resized to the same square, and its patches are pooled."""
    part = processor.video_processor
    side = part.size["height"] // part.patch_size
    rows, cols = (-(-side // pooled) for pooled in part.pooling_size)
    return {"video_grids": torch.tensor([[num_frames, rows, cols]]), "video_metadata": [size_metadata(num_frames)]}


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns the canvas of the widest tiling of each height. A picture of this size gets that tiling. The number of
    tokens depends on the tiling alone and grows with each row and column."""
    image_processor = processor.image_processor
    patch_size, side = image_processor.patch_size, image_processor.size["height"]
    margin = sum(image_processor.overlap_margins) * patch_size
    window = side - margin
    most = kwargs.get("max_crops", image_processor.max_crops)
    return [(high * window + margin, most // high * window + margin) for high in range(1, most + 1)]


def _beginning(processor: HFProcessor) -> tuple[FrameInsertion, ...]:
    token = processor.tokenizer.bos_token or processor.tokenizer.eos_token
    return (FrameInsertion(token, Position.START, unless_there=True),)


MOLMO2 = ProcessorFamily(
    processor_class="Molmo2Processor",
    modalities={
        "image": Modality(
            fields={
                "pixel_values": Flat(_num_crops),
                "image_token_pooling": PooledPatches(),
                "image_grids": Batched(),
                "image_num_crops": Batched(),
            },
            update=replaces_image_token,
            embed_token=lambda processor: "<im_patch>",
            # All of an item's tokens attend to each other, even tokens without an embedding.
            feature_tokens=lambda processor: ("<im_start>", "<low_res_im_start>", "<im_end>", "<im_col>"),
            size_outputs=_size_outputs,
            largest=_largest,
            options={
                "max_crops": int_option(
                    "max_crops", least=1, most=lambda processor: processor.image_processor.max_crops
                )
            },
        ),
        "video": replace(
            FIXED_FRAMES,
            # One video a prompt, so indices need no offset.
            fields={
                "pixel_values_videos": Flat(lambda outputs: [len(outputs["pixel_values_videos"])]),
                "video_token_pooling": Flat(lambda outputs: [len(outputs["video_token_pooling"])]),
                "video_grids": Batched(),
            },
            embed_token=lambda processor: "<im_patch>",
            feature_tokens=lambda processor: ("<im_start>", "<frame_start>", "<im_end>", "<frame_end>", "<im_col>"),
            size_outputs=_clip_outputs,
            max_items=1,
        ),
    },
    frame=_beginning,
    backends=("torchvision",),
)
