"""Small videos, and what Hugging Face's processor makes of them, for one small checkpoint."""

import functools
import io
import itertools
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
import torch
from av.video.stream import VideoStream

from raylens.preprocess.media import VideoLimits
from raylens.preprocess.video import DecodedVideo, decode_video
from tests.preprocess.parity import Pair, picture
from tests.preprocess.small_processors import prompt_placeholder

CLIPS = ((24, 64, 48, 8), (7, 48, 96, 4), (60, 32, 32, 10), (9, 48, 48, 20), (15, 48, 48, 3))
"""(frames, width, height, frames a second) of the videos in turn."""

Medium = tuple[str, int]
"""A modality, and which of its videos or pictures."""


_CODECS = {"mp4": ("mpeg4", "yuv420p"), "gif": ("gif", "rgb8")}


def encoded_clip(
    num_frames: int, width: int, height: int, fps: int, tint: int = 0, *, file_format: str = "mp4"
) -> bytes:
    """A square that moves and changes its shade, so that every frame is its own."""
    buffer = io.BytesIO()
    codec, pixel_format = _CODECS[file_format]
    with av.open(buffer, "w", format=file_format) as container:
        stream = container.add_stream(codec, rate=fps)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        for number in range(num_frames):
            pixels = np.full((height, width, 3), 30, np.uint8)
            start = number * 3 % (width - 16)
            pixels[8:24, start : start + 16] = (number * 9 % 256, 255 - number * 9 % 256, tint)
            frame = av.VideoFrame.from_ndarray(pixels).reformat(format=pixel_format)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


@functools.cache
def clip(index: int) -> bytes:
    return encoded_clip(*CLIPS[index], tint=index * 60)


@functools.cache
def all_frames(index: int) -> DecodedVideo:
    return decode_video(clip(index), lambda metadata: range(metadata.total_num_frames), limits=VideoLimits())


def whole(index: int) -> dict[str, Any]:
    """The metadata of a video of which no frames have been chosen."""
    metadata = vars(all_frames(index).metadata)
    return {**metadata, "frames_indices": list(range(metadata["total_num_frames"]))}


def has_setting(families: Pair) -> bool:
    part = families.theirs.video_processor
    return part.fps is not None or part.num_frames is not None


def one_shot(families: Pair, text: str, media: Sequence[Medium], **options: Any) -> dict[str, Any]:
    """Everything through Hugging Face's processor at once; it chooses of all frames where it has a setting for that.

    Where it has none, it gets those that we choose: all, or 32 of them.
    """
    clips = [index for modality, index in media if modality == "video"]
    pictures = [picture(index) for modality, index in media if modality == "image"]
    samples = has_setting(families) or bool(options)
    # As tensors: an array by a tensor of one index has an axis less.
    frames = [torch.from_numpy(all_frames(index).frames) for index in clips]
    if not samples:
        frames = [one[np.linspace(0, len(one) - 1, min(len(one), 32)).round().astype(int)] for one in frames]
    outputs = families.theirs(
        text=text,
        images=[pictures] if pictures else None,
        videos=frames or None,
        video_metadata=[whole(index) for index in clips] or None,
        do_sample_frames=samples,
        return_tensors="pt",
        **options,
    )
    return dict(outputs)


def items_of(families: Pair, media: Sequence[Medium], modality: str, **options: Any) -> list[Any]:
    """The videos, or the pictures, each processed alone and in prompt order."""
    own = [index for name, index in media if name == modality]
    if modality == "image":
        return families.items(own)
    process = families.ours.items.process
    return [process("video", clip(index), num_in_prompt=len(own), options=options) for index in own]


def prompt_of(model_type: str, texts: Sequence[str], media: Sequence[Medium]) -> str:
    placeholders = [prompt_placeholder(model_type, modality) for modality, _ in media]
    return "".join(itertools.chain.from_iterable(zip(texts, [*placeholders, ""], strict=True)))
