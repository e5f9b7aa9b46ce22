"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures keep their shape; each square of patches is a token."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from raylens.preprocess.field_layout import Fields, Outputs, first_row, whole
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, Size, bounded, run_image
from raylens.preprocess.models.video import FIXED_FRAMES, clip_options, least_frames, run_clip, size_metadata
from raylens.preprocess.schema import ItemTensors
from raylens.preprocess.video import DecodedVideo


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
    square = processor.image_processor.patch_size * processor.image_processor.merge_size
    return _fullest(square, _pixel_limits(processor, kwargs)["max_pixels"])


def _fullest(square: int, max_pixels: int) -> list[Size]:
    """Returns the rectangle of squares, at most 100 times as wide as high, that uses most of the pixel limit, and the
    widest single row."""
    most = max(1, max_pixels // square**2)
    high = max(range(math.isqrt(most // 100) + 1, math.isqrt(most) + 1), key=lambda high: most // high * high)
    # A picture shrunk below one row keeps one row and its full width, even beyond the limit.
    return [(high * square, most // high * square), (square, 100 * square)]


def _option_bounds(processor: HFProcessor) -> tuple[int, int]:
    """Returns the bounds of `min_pixels` and `max_pixels`, pixels of a resized picture: the model's own limits."""
    limits = _pixel_limits(processor, {})
    return limits["min_pixels"], limits["max_pixels"]


def _drop_second_frame(processor: HFProcessor, tensors: ItemTensors) -> ItemTensors:
    """Keeps one of two equal frames, (num_patches, 3 x patch x patch): these models treat a picture as a video of two
    frames."""
    patches, size = tensors["pixel_values"], 3 * processor.image_processor.patch_size**2
    if patches.shape[-1] == size:
        return tensors
    return {**tensors, "pixel_values": patches.view(len(patches), 3, 2, -1)[:, :, 0].flatten(1)}


def _repeat_frame(processor: HFProcessor, tensors: ItemTensors) -> ItemTensors:
    patches = tensors["pixel_values"].view(len(tensors["pixel_values"]), 3, 1, -1)
    return {**tensors, "pixel_values": patches.expand(-1, -1, 2, -1).flatten(1)}


def _run(processor: HFProcessor, image: Any, kwargs: Kwargs) -> Outputs:
    limits = _pixel_limits(processor, kwargs)
    size = {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}
    others = {name: value for name, value in kwargs.items() if name not in limits}
    # Does not create the second frame at all.
    return run_image(processor, image, {**others, "size": size, "temporal_patch_size": 1})


_MARKS = ("<|vision_start|>", "<|vision_end|>")

_IMAGE = Modality(
    fields={"pixel_values": whole, "image_grid_thw": first_row},
    marks=_MARKS,
    size_outputs=_size_outputs,
    largest=_largest,
    language_fields=("image_grid_thw",),
    options=bounded("min_pixels", "max_pixels", bounds=_option_bounds),
    run=_run,
    pack=_drop_second_frame,
    unpack=_repeat_frame,
)


@dataclass(frozen=True, slots=True)
class _Clips:
    """Counts a video's patches. `is_shared`: whether the pixel limit applies to all frames together, not to each."""

    is_shared: bool

    def size_outputs(self, processor: HFProcessor, num_frames: int, height: int, width: int, kwargs: Kwargs) -> Outputs:
        part = processor.video_processor
        num_steps = -(-num_frames // part.temporal_patch_size)
        num_patches = self._num_patches(part, num_frames, height, width)
        # Only the product of the last two matters for the expansion.
        grid = torch.tensor([[num_steps, 1, num_patches // num_steps]])
        return {"video_grid_thw": grid, "video_metadata": [size_metadata(num_frames)]}

    def largest(self, processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
        """Returns the largest of the best sizes for each number of frames. With a shared limit, some numbers of frames
        use more of it."""
        part = processor.video_processor
        square, most = part.patch_size * part.merge_size, min(part.max_frames, kwargs["max_frames"])
        numbers = range(1, most + 1)
        sizes = [(number, *one) for number in numbers for one in _fullest(square, self._most_pixels(part, number))]
        # Compared here, because `expansion` would be too slow for so many sizes.
        return [max(sizes, key=lambda size: self._num_patches(part, *size))]

    def _num_patches(self, part: HFProcessor, num_frames: int, height: int, width: int) -> int:
        size = dict(part.size)
        if self.is_shared:
            num_frames = max(num_frames, part.temporal_patch_size)  # as `_run_filled` does
        else:
            # Qwen2-VL's own count of patches ignores `cap_pixels_per_frame`.
            size["longest_edge"] = self._most_pixels(part, num_frames)
        count: int = part.get_num_of_video_patches(num_frames, height, width, {"size": size})
        return count

    def _most_pixels(self, part: HFProcessor, num_frames: int) -> int:
        """Returns the pixel limit of one frame, as in the processors' `resize`."""
        longest, least = part.size["longest_edge"], int(part.size["shortest_edge"] * 1.05)
        square, steps = (part.patch_size * part.merge_size) ** 2, part.temporal_patch_size
        if self.is_shared:
            if part.cap_pixels_per_frame:
                longest = max(min(part.max_video_tokens * square, longest // num_frames), least) * num_frames
            return int(longest // (max(1, round(num_frames / steps)) * steps))
        if part.cap_pixels_per_frame:
            total = int(part.max_video_tokens * square * 0.9)
            longest = max(min(longest, total * steps // num_frames), least)
        return int(longest)


def _run_filled(processor: HFProcessor, clip: DecodedVideo, kwargs: Kwargs) -> Outputs:
    """Repeats the last frame of a video that is too short for one token. Qwen3-VL's processor does the same, but only
    after its `resize` has rejected the video."""
    num_missing = least_frames(processor) - len(clip.frames)
    if num_missing > 0:
        clip = replace(clip, frames=np.concatenate([clip.frames, np.repeat(clip.frames[-1:], num_missing, axis=0)]))
    return run_clip(processor, clip, kwargs)


def _video(clips: _Clips, *, is_timed: bool = False) -> Modality:
    """Returns the modality of videos. `is_timed`: whether temporal positions are in seconds."""
    timed: Fields = {"second_per_grid_ts": first_row} if is_timed else {}
    return replace(
        FIXED_FRAMES,
        fields={"pixel_values_videos": whole, "video_grid_thw": first_row, **timed},
        marks=_MARKS,
        size_outputs=clips.size_outputs,
        largest=clips.largest,
        language_fields=("video_grid_thw", *timed),
        options=clip_options(lambda processor: processor.video_processor.max_frames),
    )


_VIDEO = _video(_Clips(is_shared=False))
_TIMED_VIDEO = _video(_Clips(is_shared=False), is_timed=True)
_SHARING_VIDEO = replace(_video(_Clips(is_shared=True)), run=_run_filled)

QWEN2_VL = ProcessorFamily(processor_class="Qwen2VLProcessor", modalities={"image": _IMAGE, "video": _VIDEO})
QWEN2_5_VL = ProcessorFamily(processor_class="Qwen2_5_VLProcessor", modalities={"image": _IMAGE, "video": _TIMED_VIDEO})
QWEN3_VL = ProcessorFamily(processor_class="Qwen3VLProcessor", modalities={"image": _IMAGE, "video": _SHARING_VIDEO})
