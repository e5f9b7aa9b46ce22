"""Molmo 2: the patches of a picture's crops, or of a video's frames, are pooled to one grid of tokens."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from raylens.encoder.models.family import Division, VisionFamily, VisionModality
from raylens.encoder.models.pixels import count_rows
from raylens.preprocess.schema import ItemTensors


def _encode_pictures(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    features = model.get_image_features(
        pixel_values=torch.cat([item["pixel_values"] for item in items]),
        image_token_pooling=_joined_pooling(items, "pixel_values", "image_token_pooling"),
        image_grids=torch.stack([item["image_grids"] for item in items]),
    )
    return list(features.pooler_output)


def _encode_clips(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    features = model.get_video_features(
        pixel_values_videos=torch.cat([item["pixel_values_videos"] for item in items]),
        video_token_pooling=_joined_pooling(items, "pixel_values_videos", "video_token_pooling"),
        video_grids=torch.stack([item["video_grids"] for item in items]),
    )
    return list(features.pooler_output)


def _joined_pooling(items: Sequence[ItemTensors], pixels: str, pooling: str) -> torch.Tensor:
    """Returns the indices of the patches that each token is pooled from, (num_tokens, most patches of a token), with
    -1 for no patch. An item's own indices start at its first patch; the result counts over all items."""
    starts = accumulate((item[pixels].shape[:2].numel() for item in items), initial=0)
    indices = zip((item[pooling] for item in items), starts, strict=False)
    return torch.cat([torch.where(own >= 0, own + start, own) for own, start in indices])


def _take_frames(item: ItemTensors, start: int, stop: int) -> ItemTensors:
    """Returns the frames [start, stop). Each frame's tokens are pooled from its own patches."""
    frames, grid = item["pixel_values_videos"], item["video_grids"]
    first, last = (frame * int(grid[1:].prod()) for frame in (start, stop))
    pooling = item["video_token_pooling"][first:last]
    return {
        **item,
        "pixel_values_videos": frames[start:stop],
        "video_token_pooling": torch.where(pooling >= 0, pooling - start * frames.shape[1], pooling),
        "video_grids": torch.cat((grid.new_tensor([stop - start]), grid[1:])),
    }


MOLMO2 = VisionFamily(
    whole="Molmo2ForConditionalGeneration",
    modalities={
        "image": VisionModality(encode=_encode_pictures, num_patches=count_rows("pixel_values", axes=2)),
        "video": VisionModality(
            encode=_encode_clips,
            num_patches=count_rows("pixel_values_videos", axes=2),
            division=Division(num_units=lambda item: len(item["pixel_values_videos"]), take=_take_frames),
        ),
    },
    has_tiles=True,
)
