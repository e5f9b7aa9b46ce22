"""Molmo 2: a small view of the whole picture, then overlapping crops of it, pooled to one grid of tokens."""

from dataclasses import replace

import torch

from raylens.preprocess.field_layout import Outputs, first_row, whole
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, Size, bounded
from raylens.preprocess.models.video import FIXED_FRAMES, size_metadata
from raylens.preprocess.prompt_updates import FrameInsertion, Position


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
                "pixel_values": whole,
                "image_token_pooling": whole,
                "image_grids": first_row,
                "image_num_crops": first_row,
            },
            embed_token=lambda processor: "<im_patch>",
            # All of an item's tokens attend to each other, even tokens without an embedding.
            feature_tokens=lambda processor: ("<im_start>", "<low_res_im_start>", "<im_end>", "<im_col>"),
            size_outputs=_size_outputs,
            largest=_largest,
            options=bounded("max_crops"),
        ),
        "video": replace(
            FIXED_FRAMES,
            fields={"pixel_values_videos": whole, "video_token_pooling": whole, "video_grids": first_row},
            embed_token=lambda processor: "<im_patch>",
            feature_tokens=lambda processor: ("<im_start>", "<frame_start>", "<im_end>", "<frame_end>", "<im_col>"),
            size_outputs=_clip_outputs,
            max_items=1,
        ),
    },
    frame=_beginning,
    backends=("torchvision",),
)
