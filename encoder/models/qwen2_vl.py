"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5: pictures keep their shape, and patches attend only within their picture."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.generic import get_max_seqlen
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from raylens.encoder.models.family import Division, VisionFamily, VisionModality
from raylens.encoder.models.pixels import count_rows
from raylens.preprocess.schema import ItemTensors


def _encode_pictures(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Encodes each picture as equal frames, because these models treat a picture as a video. Patches are of one frame,
    (num_patches, 3 x patch x patch)."""
    patches = torch.cat([item["pixel_values"] for item in items])
    owner = model.base_model
    num_frames = owner.config.vision_config.temporal_patch_size
    frames = patches.view(len(patches), 3, 1, -1).expand(-1, -1, num_frames, -1).flatten(1)
    grids = torch.stack([item["image_grid_thw"] for item in items])
    places = _places(owner, grids)
    return _with_levels(owner.get_image_features(pixel_values=frames, image_grid_thw=grids, **places))


def _encode_clips(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    patches = torch.cat([item["pixel_values_videos"] for item in items])
    grids = torch.stack([item["video_grid_thw"] for item in items])
    owner = model.base_model
    places = _places(owner, grids)
    return _with_levels(owner.get_video_features(pixel_values_videos=patches, video_grid_thw=grids, **places))


def _places(owner: PreTrainedModel, grids: torch.Tensor) -> dict[str, Any]:
    """Returns the tower's arguments for the positions of the patches of `grids` (num_items, 3) and for the bounds of
    attention. `owner`: of the tower.

    The tower would otherwise compute the same on its own device, and synchronize with the host several times."""
    config = owner.config.vision_config
    places: dict[str, Any] = {"position_ids": get_vision_position_ids(grids, config.spatial_merge_size)}
    places["cu_seqlens"], places["max_seqlen"] = get_vision_attention_seqlens(grids, config)
    if hasattr(config, "window_size"):
        windows, bounds = get_vision_window_index(
            grids, config.spatial_merge_size, config.window_size, config.patch_size
        )
        places |= {"window_index": windows, "cu_window_seqlens": bounds}
        places["max_window_seqlen"] = get_max_seqlen(bounds, config)
    tower = owner.get_submodule("visual")
    if hasattr(tower, "interpolation_mode"):
        places["interp_indices"], places["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=config.spatial_merge_size,
        )
    return places


def _with_levels(outputs: Any) -> list[torch.Tensor]:
    """Returns each item's features, followed by its deepstack levels on the last axis."""
    levels = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())]
    return [torch.cat(item, dim=-1) for item in zip(*levels, strict=True)]


def _take_steps(item: ItemTensors, start: int, stop: int) -> ItemTensors:
    """Returns the steps [start, stop) of the grid's time axis. Patches attend only within their time step."""
    grid = item["video_grid_thw"]
    first, last = (step * int(grid[1:].prod()) for step in (start, stop))
    own_grid = torch.cat((grid.new_tensor([stop - start]), grid[1:]))
    return {**item, "pixel_values_videos": item["pixel_values_videos"][first:last], "video_grid_thw": own_grid}


_IMAGE = VisionModality(
    encode=_encode_pictures, num_patches=count_rows("pixel_values"), on_host=frozenset({"image_grid_thw"})
)


def _family(whole: str, *more_projector: str) -> VisionFamily:
    return VisionFamily(
        whole=whole,
        tower="model.visual",
        projector=("model.visual.merger", *more_projector),
        modalities={
            "image": _IMAGE,
            "video": VisionModality(
                encode=_encode_clips,
                num_patches=count_rows("pixel_values_videos"),
                on_host=frozenset({"video_grid_thw"}),
                division=Division(num_units=lambda item: int(item["video_grid_thw"][0]), take=_take_steps),
            ),
        },
        is_packed=True,
    )


QWEN2_VL = _family("Qwen2VLForConditionalGeneration")
QWEN2_5_VL = _family("Qwen2_5_VLForConditionalGeneration")
QWEN3_VL = _family("Qwen3VLForConditionalGeneration", "model.visual.deepstack_merger_list")
QWEN3_VL_MOE = _family("Qwen3VLMoeForConditionalGeneration", "model.visual.deepstack_merger_list")
QWEN3_5 = _family("Qwen3_5ForConditionalGeneration")
QWEN3_5_MOE = _family("Qwen3_5MoeForConditionalGeneration")
COLQWEN2 = VisionFamily(
    whole="ColQwen2ForRetrieval",
    unused=("vlm.language_model", "embedding_proj_layer"),
    tower="vlm.visual",
    projector=("vlm.visual.merger",),
    modalities={"image": _IMAGE},
    is_packed=True,
)
