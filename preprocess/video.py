"""Decodes videos to RGB frames: only the frames that a model's processor chooses, in memory bounded by `VideoLimits`.

This module imports PyAV, and transformers when it decodes. Only the processors of video models import it.

Demuxers and decoders see the given bytes only. The formats exclude playlists and lists of files, and no protocol can
open references in a file. The memory of a file's tables is checked before a demuxer reads them."""

import io
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from raylens.preprocess import media
from raylens.preprocess.media import VideoLimits
from raylens.preprocess.schema import InvalidRequestError, invalid_media

if TYPE_CHECKING:
    from transformers.video_utils import VideoMetadata

_FORMATS = ("mov", "matroska", "avi", "gif", "mpegts")  # mov also reads MP4, matroska also WebM
_FORMATS_FOR_PEOPLE = "MP4, MOV, WebM, MKV, AVI, GIF or MPEG-TS"
_DECODERS = (
    *("h264", "hevc", "libdav1d", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "h263"),
    *("mjpeg", "gif", "prores"),
)
_MAX_STREAMS = 32
# The mov demuxer allocates some 60 bytes for each sample of each track. A few bytes of the file can declare many.
_MAX_INDEX_ENTRIES = 5_000_000
_MP4_BOXES = frozenset(b"ftyp styp sidx moov moof mdat mfra free skip wide pnot uuid".split())
_EBML_MAGIC = bytes.fromhex("1a45dfa3")
_MATROSKA_SEGMENT = bytes.fromhex("18538067")
_TS_PACKET = 188  # bytes
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
    file_format = _checked_format(content)
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
    with _refusing(content):
        container = _opened(content, file_format, limits=limits)
    with container:
        with _refusing(content):
            stream = _video_stream(container, limits=limits)
            # Packets may hold no frame, so only decoding to the end yields the number of frames.
            to_the_end = total is None and stream.frames <= 0
            if to_the_end:
                total = _num_packets(content, file_format, limits=limits)
            metadata = _metadata(stream, total=total or stream.frames, limits=limits)
        indices = _chosen(choose_frames, metadata=metadata, limits=limits)
        with _refusing(content):
            stream.codec_context.thread_count = 1
            frames, num_decoded = _decoded(container, stream, indices=indices, to_the_end=to_the_end, limits=limits)
    if num_decoded not in (None, metadata.total_num_frames):
        return num_decoded
    metadata.frames_indices = indices
    metadata.height, metadata.width = frames.shape[1:3]
    return DecodedVideo(frames, metadata)


@contextmanager
def _refusing(content: bytes) -> Iterator[None]:
    """Turns all errors of reading hostile bytes into an InvalidRequestError."""
    try:
        yield
    except InvalidRequestError:
        raise
    # PyAV raises its own errors, and OSError, ValueError, IndexError, UnicodeDecodeError, ... for hostile bytes.
    except Exception as error:
        reason = f"the {len(content)} bytes are not a readable video ({_FORMATS_FOR_PEOPLE}), or a damaged one"
        raise invalid_media(reason, "invalid_video") from error


def _checked_format(content: bytes) -> str:
    """Returns the only demuxer that may read the content, by its first bytes.

    Raises InvalidRequestError for anything but `_FORMATS`, for a truncated file, and for a file with tables out of
    proportion."""
    with _refusing(content):
        file_format = _format_of(content)
        if _is_cut_off(content, file_format):
            reason = f"the video is cut off: by what it declares it is longer than its {len(content)} bytes"
            raise invalid_media(reason, "corrupt_video")
        if file_format == "mov":
            _check_tables(content)
    return file_format


def _format_of(content: bytes) -> str:
    if content.startswith(_EBML_MAGIC):
        return "matroska"
    if content.startswith(b"RIFF") and content[8:12] == b"AVI ":
        return "avi"
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if content[4:8] in _MP4_BOXES:
        return "mov"
    if content[: 3 * _TS_PACKET : _TS_PACKET] == b"GGG":  # each packet begins with the sync byte
        return "mpegts"
    reason = f"the {len(content)} bytes are not a video of a readable format ({_FORMATS_FOR_PEOPLE})"
    raise invalid_media(reason, "invalid_video")


def _opened(content: bytes, file_format: str, limits: VideoLimits) -> InputContainer:
    options = {
        # These two also apply to nested content, such as the subtitles of an AVI: no playlists, and no protocol that
        # could open another file or address.
        "format_whitelist": ",".join(_FORMATS),
        "protocol_whitelist": "none",
        # Opening already decodes a little, to complete the header's data.
        "codec_whitelist": ",".join(_DECODERS),
        "max_pixels": str(_decoder_pixels(limits)),
        "max_streams": str(_MAX_STREAMS),
    }
    # Titles and other texts in an unknown encoding do not make a video invalid.
    return av.open(io.BytesIO(content), mode="r", format=file_format, options=options, metadata_errors="replace")


def _decoder_pixels(limits: VideoLimits) -> int:
    """Returns the pixel bound for decoders, which round widths up to 64. The exact, lower limit is checked as well."""
    return 2 * limits.max_frame_pixels + 2**22


def _video_stream(container: InputContainer, limits: VideoLimits) -> VideoStream:
    """Returns the first video stream, like transformers, but never the cover picture of a sound file.

    Raises InvalidRequestError if there is none or its codec is not one of `_DECODERS`."""
    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not streams:
        raise invalid_media("the file has no video stream", "invalid_video")
    codec = streams[0].codec_context
    if codec.name not in _DECODERS:
        raise invalid_media(f"the video's codec, {codec.name}, is not one of {', '.join(_DECODERS)}", "invalid_video")
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


def _is_cut_off(content: bytes, file_format: str) -> bool:
    """Returns whether the file is cut off: it declares more bytes than it has, or is a GIF without its last byte.
    Decoders accept a truncated file silently.

    MPEG-TS and live WebM declare no size, so they are never reported as cut off."""
    if file_format == "mov":
        return any(kind in _MP4_BOXES and end > len(content) for kind, _, end in _boxes(content))
    if file_format == "matroska":
        return (_segment_end(content) or 0) > len(content)
    if file_format == "avi":
        # Some writers include the 8 bytes of the header.
        return int.from_bytes(content[4:8], "little") > len(content)
    if file_format == "gif":
        return not content.rstrip(b"\0\r\n ").endswith(b";")
    return False


def _boxes(content: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields the kind, start and end of each top-level box of an MP4 file. The last may end beyond the content."""
    start = 0
    while start + 8 <= len(content):
        size, kind, long_size = struct.unpack(">I4sQ", content[start : start + 16].ljust(16, b"\0"))
        size = {0: len(content) - start, 1: long_size}.get(size, size)
        if size < 8:
            return
        yield kind, start, start + size
        start += size


def _segment_end(content: bytes) -> int | None:
    """Returns the end of a Matroska file's segment, or None if the file does not declare it."""
    header_size, after = _ebml_size(content, at=4)
    segment = after + (header_size or 0)
    if content[segment : segment + 4] != _MATROSKA_SEGMENT:
        return None
    size, after = _ebml_size(content, at=segment + 4)
    return None if size is None else after + size


def _ebml_size(content: bytes, at: int) -> tuple[int | None, int]:
    """Returns the size at `at`, or None if unknown, and the position after it. A size has 1 to 8 bytes: one more than
    the leading zeros of its first byte. All ones mean unknown."""
    length = 9 - content[at].bit_length()
    mask = 2 ** (7 * length) - 1
    size = int.from_bytes(content[at : at + length], "big") & mask
    return (None if size == mask else size), at + length


def _check_tables(content: bytes) -> None:
    """Raises InvalidRequestError for an MP4 file without a movie header, with a compressed one, or whose small tables
    expand to a huge index.

    `stsz` and `trun` declare samples without bytes of their own, and each edit of an `elst` multiplies the samples. The
    check searches the tables by name in all boxes but the media data, at any depth, because demuxers are lenient."""
    if not any(kind == b"moov" for kind, _, _ in _boxes(content)):
        raise invalid_media("the file has no movie header, it is no video or an incomplete one", "invalid_video")
    num_samples, num_edits = 0, 1
    for kind, start, end in _boxes(content):
        if kind == b"mdat":
            continue
        if content.find(b"cmov", start, end) >= 0:
            raise invalid_media("the video has a compressed header, which is not read", "invalid_video")
        for name, offset in ((b"stsz", 12), (b"stz2", 12), (b"trun", 8)):
            num_samples += sum(_numbers(content, name, offset, start, end))
        num_edits = max(num_edits, *_numbers(content, b"elst", 8, start, end), 1)
    if num_samples * num_edits > _MAX_INDEX_ENTRIES:
        number = f"{num_samples} samples in {num_edits} edits"
        raise invalid_media(f"the video declares {number}, the limit is {_MAX_INDEX_ENTRIES} in all", "video_too_long")


def _numbers(content: bytes, name: bytes, offset: int, start: int, end: int) -> Iterator[int]:
    """Yields the 32-bit number `offset` bytes after the name of each box `name` in content[start:end]."""
    at = content.find(name, start, end)
    while at >= 0:
        # A size of 1 before the name: the actual size, of 8 bytes, follows the name.
        number = at + offset + (8 if content[at - 4 : at] == b"\0\0\0\1" else 0)
        yield int.from_bytes(content[number : number + 4], "big")
        at = content.find(name, at + 1, end)
