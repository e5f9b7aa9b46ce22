"""Decodes, samples and processes videos, in the same way for all families."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from transformers.video_utils import VideoMetadata

from raylens.preprocess.field_layout import Outputs, blank_pixels, first_row
from raylens.preprocess.media import MediaLimits, VideoLimits, check_shape
from raylens.preprocess.models.family import DEFAULT_FRAMES, HFProcessor, Kwargs, Modality, Option, Size, bounded
from raylens.preprocess.prompt_updates import PromptReplacement
from raylens.preprocess.schema import invalid_media, invalid_option
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


def run_clip(processor: HFProcessor, clip: DecodedVideo, kwargs: Kwargs) -> Outputs:
    """Processes sampled frames. Some prompts contain timestamps, which come from the metadata."""
    settings = {name: value for name, value in kwargs.items() if name not in (*_RATES, DEFAULT_FRAMES)}
    settings |= {"do_sample_frames": False, "return_metadata": True}
    metadata = dataclasses.replace(clip.metadata)  # a copy, because some processors fill in missing values
    outputs, _ = processor._process_videos([clip.frames], video_metadata=[metadata], **settings)
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
    num_frames = bounded("num_frames", bounds=lambda processor: (least_frames(processor), most_frames(processor)))
    return {"fps": _fps, **num_frames}


def _fps(processor: HFProcessor, value: object) -> Kwargs:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_FPS:
        raise invalid_option("fps", f"must be a number above 0, at most {MAX_FPS}")
    return {"fps": value}


def least_frames(processor: HFProcessor) -> int:
    """Returns the fewest frames of a video: the frames of one token."""
    return getattr(processor.video_processor, "temporal_patch_size", None) or 1


def _frames_outputs(processor: HFProcessor, num_frames: int, height: int, width: int, kwargs: Kwargs) -> Outputs:
    return {"pixel_values_videos": blank_pixels(1, num_frames), "video_metadata": [size_metadata(num_frames)]}


def _sample(processor: HFProcessor, kwargs: Kwargs, metadata: VideoMetadata, *, most: int) -> Any:
    """Chooses frames as `BaseVideoProcessor.preprocess` does: by the request's settings, or else by the processor's.

    Without any setting, frames are evenly spaced, and a short video keeps all. Raises InvalidRequestError if the
    processor finds no frames."""
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
            reason = f"at {settings['fps']:g} a second too few are left"
            length = f"the video has {total} frames in {metadata.duration:.2f} s"
            raise invalid_media(f"{length}, {reason}", "video_too_short") from None
        return np.linspace(0, total - 1, min(total, num_frames)).round().astype(int)
    # Some processors call torch.arange with the step total / number, which may go one step too far.
    return chosen[chosen < total]


FIXED_FRAMES = Modality(
    fields={"pixel_values_videos": first_row},
    update=lambda processor: PromptReplacement(processor.video_token),
    embed_token=lambda processor: processor.video_token,
    size_outputs=_frames_outputs,
    # With `fps`, the limits bound the number of frames.
    largest=lambda processor, kwargs: [(kwargs["max_frames"], 336, 336)],
    decode=decode_clip,
    blank=blank_clip,
    run=run_clip,
    expansion=lambda processor, outputs, kwargs: processor.replace_video_token(outputs, video_idx=0, **kwargs),
    # Only a check: the server's limits decide the number of frames.
    options=clip_options(lambda processor: VideoLimits().max_frames),
)
"""Every frame is resized to one size, so the number of tokens depends only on the number of frames."""
