"""Decodes videos to RGB frames: only the frames that a model's processor chooses, in memory bounded by `VideoLimits`.

Only the processors of video models import this module, because it imports PyAV, and transformers when it decodes.
`preprocess/containers.py` opens the files."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from raylens.preprocess import media
from raylens.preprocess.containers import MediaKind
from raylens.preprocess.media import VideoLimits
from raylens.preprocess.schema import InvalidRequestError, invalid_media

if TYPE_CHECKING:
    from transformers.video_utils import VideoMetadata

_VIDEO = MediaKind(
    "video",
    formats=("mov", "matroska", "avi", "gif", "mpegts"),  # mov also reads MP4, matroska also WebM
    for_people="MP4, MOV, WebM, MKV, AVI, GIF or MPEG-TS",
    decoders=(
        *("h264", "hevc", "libdav1d", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "h263"),
        *("mjpeg", "gif", "prores"),
    ),
)
_FALLBACK_FPS = Fraction(24)  # transformers' own, for a file without a frame rate


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """`frames`: uint8 RGB of shape (num_frames, height, width, 3), upright.

    `metadata`: `total_num_frames`, `fps` and `duration` (seconds) of the source, `width` and `height` of `frames`, and
    `frames_indices`, each frame's index in the source."""

    frames: NDArray[np.uint8]
    metadata: "VideoMetadata"


ChooseFrames: TypeAlias = "Callable[[VideoMetadata], Iterable[int]]"


def decode_video(content: bytes, choose_frames: ChooseFrames, *, limits: VideoLimits) -> DecodedVideo:
    """Decodes the frames of a video file that `choose_frames` picks, rotated by the file's display matrix.

    `choose_frames` gets the metadata without `frames_indices`. It returns ascending indices of frames in the order of
    presentation, repeats allowed. It runs again if the file holds another number of frames than it declares. Its errors
    pass through, but a ValueError becomes an InvalidRequestError: processors of transformers raise it for too few
    frames. Decoding and conversion to RGB take one thread.

    Raises InvalidRequestError for bytes that are no such video, are damaged or cut off, or exceed `limits`."""
    file_format = _VIDEO.checked_format(content)
    total: int | None = None
    for _ in range(2):
        decoded = _decode_pass(content, file_format, choose_frames, total=total, limits=limits)
        if isinstance(decoded, DecodedVideo):
            return decoded
        total = decoded
    # Decoding is deterministic. If the number changes yet again, the file is rejected.
    raise invalid_media("the video is damaged, its number of frames changes", "corrupt_video")


def _decode_pass(
    content: bytes, file_format: str, choose_frames: ChooseFrames, *, total: int | None, limits: VideoLimits
) -> DecodedVideo | int:
    """Returns the video, or its real number of frames if frames were chosen by a wrong number.

    `total`: the real number, if an earlier pass found it. None: the number that the file declares."""
    with _VIDEO.refusing(content):
        container = _opened(content, file_format, limits=limits)
    with container:
        with _VIDEO.refusing(content):
            stream = _video_stream(container, limits=limits)
            # Packets may hold no frame, so only decoding to the end yields the number of frames.
            to_the_end = total is None and stream.frames <= 0
            if to_the_end:
                total = _num_packets(content, file_format, limits=limits)
            metadata = _metadata(stream, total=total or stream.frames, limits=limits)
        indices = _chosen(choose_frames, metadata=metadata, limits=limits)
        with _VIDEO.refusing(content):
            stream.codec_context.thread_count = 1
            frames, num_decoded = _decoded(container, stream, indices=indices, to_the_end=to_the_end, limits=limits)
    if num_decoded not in (None, metadata.total_num_frames):
        return num_decoded
    metadata.frames_indices = indices
    metadata.height, metadata.width = frames.shape[1:3]
    return DecodedVideo(frames, metadata)


def _opened(content: bytes, file_format: str, limits: VideoLimits) -> InputContainer:
    return _VIDEO.opened(content, file_format, max_pixels=str(_decoder_pixels(limits)))


def _decoder_pixels(limits: VideoLimits) -> int:
    """Returns the pixel bound for decoders, which round widths up to 64. The exact, lower limit is checked as well."""
    return 2 * limits.max_frame_pixels + 2**22


def _video_stream(container: InputContainer, limits: VideoLimits) -> VideoStream:
    """Returns the first video stream, like transformers, but never the cover picture of a sound file.

    Raises InvalidRequestError if there is none or its codec is none of the decoders."""
    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not streams:
        raise invalid_media("the file has no video stream", "invalid_video")
    codec = streams[0].codec_context
    _VIDEO.check_decoder(codec.name)
    codec.options = {"max_pixels": str(_decoder_pixels(limits))}
    return streams[0]


def _metadata(stream: VideoStream, total: int, limits: VideoLimits) -> "VideoMetadata":
    """Returns the metadata of a video of `total` frames, equal to that of transformers' read_video_pyav.

    Raises InvalidRequestError if the video exceeds `limits`."""
    # Imported late, because `make_importable` must run before the import of transformers' processors.
    from transformers.video_utils import VideoMetadata

    _check_size(stream.width, stream.height, num_frames=1, limits=limits)
    if total > media.MAX_SOURCE_FRAMES:
        raise invalid_media(f"the video has more than {media.MAX_SOURCE_FRAMES} frames, the limit", "video_too_long")
    _check_source_pixels(total * stream.width * stream.height, limits=limits)
    if total <= 0:
        raise invalid_media("the video has no frames", "corrupt_video")
    rate = stream.average_rate or stream.guessed_rate or stream.base_rate or _FALLBACK_FPS
    duration = float(total / rate)
    if duration > limits.max_duration_s:
        reason = f"the video is {duration:.1f} s long, the limit is {limits.max_duration_s:g} s"
        raise invalid_media(reason, "video_too_long")
    size = {"height": stream.height, "width": stream.width}
    return VideoMetadata(total_num_frames=total, fps=float(rate), duration=duration, video_backend="pyav", **size)


def _num_packets(content: bytes, file_format: str, limits: VideoLimits) -> int:
    """Returns the number of the video's packets, counted without decoding. Stops beyond `MAX_SOURCE_FRAMES`."""
    num_packets = 0
    with _opened(content, file_format, limits=limits) as container:
        for packet in container.demux(_video_stream(container, limits=limits)):
            num_packets += packet.size > 0
            if num_packets > media.MAX_SOURCE_FRAMES:
                break
    return num_packets


def _chosen(choose_frames: ChooseFrames, metadata: "VideoMetadata", limits: VideoLimits) -> list[int]:
    total = metadata.total_num_frames
    try:
        # A copy, because samplers of transformers fill in missing values.
        indices = [int(index) for index in choose_frames(replace(metadata))]
    except InvalidRequestError:
        raise
    except ValueError as error:
        reason = f"the model takes no frames of a video of {total} frames, {metadata.duration:.2f} s"
        raise invalid_media(reason, "invalid_frames") from error
    if len(indices) > limits.max_frames:
        reason = f"{len(indices)} frames of the video would be used, the limit is {limits.max_frames}"
        raise invalid_media(reason, "too_many_frames")
    ascending = all(left <= right for left, right in pairwise(indices))
    if not indices or not ascending or indices[0] < 0 or indices[-1] >= total:
        raise invalid_media(f"the frames chosen are not ascending ones of a video of {total} frames", "invalid_frames")
    _check_size(metadata.width, metadata.height, num_frames=len(indices), limits=limits)
    return indices


def _check_size(width: int, height: int, num_frames: int, limits: VideoLimits) -> None:
    size = f"{width}x{height} pixels"
    if width * height > limits.max_frame_pixels:
        raise invalid_media(f"the video is {size}, the limit is {limits.max_frame_pixels} in all", "video_too_large")
    if num_frames * width * height > limits.max_total_pixels:
        limit = f"the limit is {limits.max_total_pixels} pixels in all"
        raise invalid_media(f"{num_frames} frames of {size} would be used, {limit}", "video_too_large")


def _check_source_pixels(num_pixels: int, limits: VideoLimits) -> None:
    """Raises InvalidRequestError if the frames to decode have too many pixels. The file size is no bound: a still frame
    takes a few bytes, but decodes as slowly as any other."""
    if num_pixels > limits.max_source_pixels:
        limit = f"the limit is {limits.max_source_pixels}"
        raise invalid_media(f"the frames of the video have {num_pixels} pixels or more, {limit}", "video_too_long")


def _decoded(
    container: InputContainer, stream: VideoStream, *, indices: list[int], to_the_end: bool, limits: VideoLimits
) -> tuple[NDArray[np.uint8], int | None]:
    """Returns the frames at `indices` and, if decoding reached the end, the number of all frames, else None.

    Decodes from the first frame, without seeking: after a seek, a frame's index would have to be derived from its time,
    which fails with variable frame rates or dropped frames. Only the frames at `indices` are converted and kept."""
    frames = np.empty((0, 0, 0, 3), dtype=np.uint8)
    num_decoded, num_kept, num_pixels = 0, 0, 0
    for frame in container.decode(stream):
        num_pixels += frame.width * frame.height
        _check_source_pixels(num_pixels, limits=limits)
        if frame.is_corrupt:
            raise invalid_media(f"the video is damaged at frame {num_decoded}", "corrupt_video")
        num_repeats = bisect_right(indices, num_decoded) - num_kept
        if num_repeats:
            _check_size(frame.width, frame.height, num_frames=len(indices), limits=limits)
            picture = _upright(frame)
            if not num_kept:
                frames = np.empty((len(indices), *picture.shape), dtype=np.uint8)
            if picture.shape != frames.shape[1:]:
                raise invalid_media(f"the video changes its size at frame {num_decoded}", "invalid_video")
            frames[num_kept : num_kept + num_repeats] = picture
            num_kept += num_repeats
        num_decoded += 1
        if num_kept == len(indices) and not to_the_end:
            return frames, None
    if not num_decoded:
        raise invalid_media("the video has no frame that can be decoded", "corrupt_video")
    return frames, num_decoded


def _upright(frame: VideoFrame) -> NDArray[np.uint8]:
    """Returns one frame as uint8 RGB of shape (height, width, 3), rotated by its display matrix in steps of 90°."""
    picture = frame.to_ndarray(format="rgb24", threads=1)
    return np.rot90(picture, k=round(frame.rotation / 90)).astype(np.uint8, copy=False)
