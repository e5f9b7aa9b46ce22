"""Decodes, samples and processes videos, in the same way for all families."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers.video_utils import VideoMetadata

from raylens.preprocess.field_layout import Batched, Outputs
from raylens.preprocess.media import MediaLimits, VideoLimits, check_shape
from raylens.preprocess.models.family import (
    DEFAULT_FRAMES,
    HFProcessor,
    Kwargs,
    Modality,
    Option,
    Size,
    blank_pixels,
    checked_int,
    invalid_option,
    replace_video_token,
    replaces_video_token,
    video_token,
)
from raylens.preprocess.schema import InvalidRequestError
from raylens.preprocess.video import DecodedVideo, decode_video

MAX_FPS = 30
_RATES = ("num_frames", "fps")
_NOT_FOR_SAMPLING = {"input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"}


def decode_clip(processor: HFProcessor, content: bytes, limits: MediaLimits, kwargs: Kwargs) -> DecodedVideo:
    """Decodes the frames chosen by the model's own sampler."""
    chosen: list[Any] = []

    def choose(metadata: VideoMetadata) -> Any:
        check_shape((metadata.width, metadata.height), kind="video")
        chosen.append(_sample(processor, kwargs, metadata, most=limits.video.max_frames))
        return chosen[-1]

    clip = decode_video(content, choose, limits=limits.video)
    # In the sampler's own type: transformers computes times from a tensor of indices in lower precision.
    clip.metadata.frames_indices = chosen[-1]
    return clip


def run_clips(processor: HFProcessor, clips: Sequence[DecodedVideo], kwargs: Kwargs) -> Outputs:
    """Processes sampled frames. Some prompts contain timestamps, which come from the metadata."""
    # Copies, because some processors fill in missing values.
    metadata = [dataclasses.replace(clip.metadata) for clip in clips]
    outputs, _ = processor._process_videos(
        [clip.frames for clip in clips],
        video_metadata=metadata,
        **{
            **{name: value for name, value in kwargs.items() if name not in (*_RATES, DEFAULT_FRAMES)},
            "do_sample_frames": False,
            "return_metadata": True,
        },
    )
    return outputs  # type: ignore[no-any-return]


def blank_clip(size: Size) -> DecodedVideo:
    num_frames, height, width = size
    return DecodedVideo(np.zeros((num_frames, height, width, 3), dtype=np.uint8), size_metadata(num_frames))


def size_metadata(num_frames: int) -> Any:
    """Returns the metadata of a clip with known length only. The frame rate is transformers' fallback."""
    indices = np.arange(num_frames)
    return VideoMetadata(total_num_frames=num_frames, fps=24.0, duration=num_frames / 24, frames_indices=indices)


def clip_options(most_frames: Callable[[HFProcessor], int]) -> Mapping[str, Option]:
    """Returns the options `num_frames` and `fps` of a video. A video with fewer frames than `num_frames` keeps all.
    With both options, the one with fewer frames applies."""

    def num_frames(processor: HFProcessor, value: object) -> Kwargs:
        least, most = least_frames(processor), most_frames(processor)
        return {"num_frames": checked_int("num_frames", value, least=least, most=most)}

    def fps(processor: HFProcessor, value: object) -> Kwargs:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_FPS:
            raise invalid_option("fps", f"must be a number above 0, at most {MAX_FPS}")
        return {"fps": value}

    return {"fps": fps, "num_frames": num_frames}


def least_frames(processor: HFProcessor) -> int:
    """Returns the fewest frames of a video: the frames of one token."""
    return getattr(processor.video_processor, "temporal_patch_size", None) or 1


def _frames_outputs(processor: HFProcessor, num_frames: int, height: int, width: int, kwargs: Kwargs) -> Outputs:
    return {"pixel_values_videos": blank_pixels(1, num_frames), "video_metadata": [size_metadata(num_frames)]}


def _longest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns the longest video, of any frame size, because all frames are resized to one size. With `fps`, the limits
    bound the number of frames."""
    return [(kwargs["max_frames"], 336, 336)]


def _sample(processor: HFProcessor, kwargs: Kwargs, metadata: VideoMetadata, *, most: int) -> Any:
    """Chooses frames as `BaseVideoProcessor.preprocess` does: by the request's settings, or else by the processor's.

    Without any setting, frames are evenly spaced, and a short video keeps all. Raises InvalidRequestError if the
    processor finds no frames.
    """
    part, total = processor.video_processor, metadata.total_num_frames
    if total < least_frames(processor):
        return np.arange(total)  # samplers reject so few frames; `run` repeats the last to fill a token
    rates = {name: kwargs.get(name) for name in _RATES}
    num_frames, fps = rates.values()
    if num_frames is None and fps is None:
        rates = {name: getattr(part, name, None) for name in _RATES}
        if set(rates.values()) == {None}:
            return np.linspace(0, total - 1, min(total, most, kwargs[DEFAULT_FRAMES])).round().astype(int)
    elif num_frames is not None and fps is not None:  # some samplers reject both together
        chosen = _sample_at(part, {**kwargs, "num_frames": None, "fps": fps}, metadata)
        if len(chosen) <= num_frames:
            return chosen
        rates["fps"] = None
    return _sample_at(part, {**kwargs, **rates}, metadata)


def _sample_at(part: HFProcessor, kwargs: Kwargs, metadata: VideoMetadata) -> Any:
    """Returns the frames that the video processor chooses. If the processor rejects a video with too few frames, all
    frames are kept."""
    names = [name for name in part.valid_kwargs.__annotations__ if name not in _NOT_FOR_SAMPLING]
    settings = {name: kwargs.get(name, getattr(part, name, None)) for name in names}
    total, num_frames = metadata.total_num_frames, settings["num_frames"]
    try:
        chosen = part.sample_frames(metadata=metadata, **settings)
    except (ValueError, ZeroDivisionError):
        if num_frames is None:
            raise _too_short(metadata, f"at {settings['fps']:g} a second too few are left") from None
        return np.linspace(0, total - 1, min(total, num_frames)).round().astype(int)
    # Some processors call torch.arange with the step total / number, which may go one step too far.
    return chosen[chosen < total]


def _too_short(metadata: VideoMetadata, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the video has {metadata.total_num_frames} frames in {metadata.duration:.2f} s, {reason}",
        field="media",
        code="video_too_short",
    )


FIXED_FRAMES = Modality(
    fields={"pixel_values_videos": Batched()},
    update=replaces_video_token,
    embed_token=video_token,
    size_outputs=_frames_outputs,
    largest=_longest,
    decode=decode_clip,
    blank=blank_clip,
    run=run_clips,
    expansion=replace_video_token,
    # Only a check: the server's limits decide the number of frames.
    options=clip_options(lambda processor: VideoLimits().max_frames),
)
"""Every frame is resized to one size, so the number of tokens depends only on the number of frames."""
