"""Videos: decoded, sampled and processed the same way for every family that takes them."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from preprocess.field_layout import Batched, Outputs
from preprocess.media import MediaLimits
from preprocess.models.family import (
    HFProcessor,
    Kwargs,
    Modality,
    Option,
    Size,
    blank_pixels,
    invalid_option,
    replace_video_token,
    replaces_video_token,
    video_token,
)
from preprocess.video import DecodedVideo, decode_video

DEFAULT_NUM_FRAMES = 32
"""Frames of a video where a checkpoint says neither how many nor how many a second. transformers would take them all,
which for a minute of film is 1,500; the families without a setting were trained with 8 to 32."""

MAX_FPS = 30
_NOT_FOR_SAMPLING = {"input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"}


def decode_clip(processor: HFProcessor, content: bytes, limits: MediaLimits, kwargs: Kwargs) -> DecodedVideo:
    """Decodes the frames that the model's own processor would sample."""
    return decode_video(content, partial(_choose_frames, processor, kwargs), limits=limits.video)


def run_clips(processor: HFProcessor, clips: Sequence[DecodedVideo], kwargs: Kwargs) -> Outputs:
    """Processes frames that have been sampled already; with the metadata, from which some prompts tell the time."""
    options = {name: value for name, value in kwargs.items() if name not in ("fps", "num_frames")}
    # Copies, for some processors fill in what they miss.
    metadata = [dataclasses.replace(clip.metadata) for clip in clips]
    outputs, _ = processor._process_videos(
        [clip.frames for clip in clips],
        video_metadata=metadata,
        **{**options, "do_sample_frames": False, "return_metadata": True},
    )
    return outputs  # type: ignore[no-any-return]


def size_metadata(num_frames: int) -> Any:
    """Metadata of a clip of which nothing is known but its length; the frame rate is transformers' fallback."""
    from transformers.video_utils import VideoMetadata

    indices = list(range(num_frames))
    return VideoMetadata(total_num_frames=num_frames, fps=24.0, duration=num_frames / 24, frames_indices=indices)


def frames_option(name: str, limit: float) -> Option:
    """`num_frames` or `fps` of a video, at most `limit`. Either one unsets the other."""
    other = "fps" if name == "num_frames" else "num_frames"

    def parse(processor: HFProcessor, value: object) -> Kwargs:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= limit or (name == "num_frames" and value != int(value)):  # type: ignore[operator,call-overload]
            raise invalid_option(name, f"must be a number above 0, at most {limit:g}")
        return {name: value, other: None}

    return parse


VIDEO_OPTIONS = {"fps": frames_option("fps", MAX_FPS), "num_frames": frames_option("num_frames", 768)}


def _frames_outputs(processor: HFProcessor, num_frames: int, height: int, width: int, kwargs: Kwargs) -> Outputs:
    return {"pixel_values_videos": blank_pixels(1, num_frames), "video_metadata": [size_metadata(num_frames)]}


def _default_length(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    num_frames = kwargs.get("num_frames") or processor.video_processor.num_frames or DEFAULT_NUM_FRAMES
    return [(num_frames, 336, 336)]


def _choose_frames(processor: HFProcessor, kwargs: Kwargs, metadata: Any) -> list[int]:
    """What `BaseVideoProcessor.preprocess` does to choose them: the call's settings, else the processor's own."""
    video_processor = processor.video_processor
    names = [name for name in video_processor.valid_kwargs.__annotations__ if name not in _NOT_FOR_SAMPLING]
    own = {name: getattr(video_processor, name, None) for name in names}
    settings = own | {name: value for name, value in kwargs.items() if name in names}
    if settings.get("num_frames") is None and settings.get("fps") is None:
        total = metadata.total_num_frames
        return [int(index) for index in np.linspace(0, total - 1, min(total, DEFAULT_NUM_FRAMES)).round()]
    try:
        chosen = np.asarray(video_processor.sample_frames(metadata=dataclasses.replace(metadata), **settings))
    except ZeroDivisionError:
        raise ValueError("too few frames to sample any") from None
    # torch.arange by steps of total / number, as some processors do it, may run one step too far.
    return [int(index) for index in chosen if index < metadata.total_num_frames]


FIXED_FRAMES = Modality(
    fields={"pixel_values_videos": Batched()},
    update=replaces_video_token,
    embed_token=video_token,
    size_outputs=_frames_outputs,
    largest=_default_length,
    decode=decode_clip,
    run=run_clips,
    expansion=replace_video_token,
    options=VIDEO_OPTIONS,
    one_by_one=True,
)
"""Every frame is brought to one size, and the number of tokens follows from that of the frames."""
