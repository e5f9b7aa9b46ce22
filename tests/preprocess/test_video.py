"""Videos made on the spot to frames: the right ones, within limits, and from the given bytes alone."""

import ctypes
import io
import os
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import av
import numpy as np
import pytest
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image
from transformers.video_utils import VideoMetadata, load_video

from raylens.preprocess import video
from raylens.preprocess.containers import MediaKind
from raylens.preprocess.media import VideoLimits
from raylens.preprocess.schema import InvalidRequestError
from raylens.preprocess.video import DecodedVideo, decode_video
from tests.pictures import disc, encoded

VideoPacket: TypeAlias = "Packet[VideoStream]"

SIZE = (64, 48)
LIMITS = VideoLimits()
_IN_OPEN = 0x20
_IN_NONBLOCK = 0x800

needs_h264 = pytest.mark.skipif("libx264" not in av.codecs_available, reason="PyAV came without an H.264 encoder")

# (container, encoder, its options); B-frames where there are some, so that frames are not stored in order.
KINDS = [
    ("mp4", "libx264", {"bf": "3", "g": "12"}),
    ("mp4", "libx265", {"x265-params": "log-level=none:bframes=3"}),
    ("mp4", "mpeg4", {"bf": "2"}),
    ("matroska", "libx264", {"bf": "3"}),
    ("webm", "libvpx-vp9", {"cpu-used": "8"}),
    ("webm", "libvpx", {}),
    ("avi", "mpeg4", {}),
    ("mpegts", "libx264", {"bf": "3", "g": "12"}),
    ("gif", "gif", {}),
]
KINDS = [kind for kind in KINDS if kind[1] in av.codecs_available]


def bars(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """A picture of eight bars, white for each bit of `number` that is set."""
    bits = [255 * (number >> bit & 1) for bit in range(8)]
    return np.repeat(np.array(bits, dtype=np.uint8), size[0] // 8)[None, :, None].repeat(size[1], 0).repeat(3, 2)


def number_of(picture: np.ndarray) -> int:
    """The number whose `bars` these are."""
    width = picture.shape[1] // 8
    middle = picture[picture.shape[0] // 2].mean(axis=-1)
    return sum(int(middle[bit * width + width // 2] > 128) << bit for bit in range(8))


def add_video(container: Any, encoder: str, size: tuple[int, int], options: dict[str, str]) -> VideoStream:
    stream: VideoStream = container.add_stream(encoder, rate=25, options=options)
    stream.width, stream.height = size
    stream.pix_fmt = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(encoder, "yuv420p")
    return stream


def made(
    file_format: str = "mp4",
    encoder: str = "mpeg4",
    options: dict[str, str] | None = None,
    *,
    num_frames: int = 40,
    size: tuple[int, int] = SIZE,
    times_ms: Sequence[int] | None = None,
    muxer: dict[str, str] | None = None,
    prepare: Callable[[VideoStream], None] = lambda stream: None,
) -> bytes:
    """A video file whose frame i shows `bars(i)`, at 25 frames a second or at `times_ms`."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=file_format, options=muxer or {}) as container:
        stream = add_video(container, encoder, size=size, options=options or {})
        prepare(stream)
        for number in range(num_frames):
            frame = VideoFrame.from_ndarray(bars(number, size), format="rgb24")
            frame.pts = times_ms[number] if times_ms else number * 40
            frame.time_base = Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def remuxed(
    *contents: bytes, file_format: str, change: Callable[[int, VideoPacket], VideoPacket] | None = None
) -> bytes:
    """The packets of all contents one after the other in one file, each as `change` of its number makes it."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=file_format) as target:
        stream, number = None, 0
        for content in contents:
            with av.open(io.BytesIO(content), "r") as source:
                stream = stream or target.add_stream_from_template(source.streams.video[0])
                for packet in source.demux(source.streams.video[0]):
                    if packet.size:
                        new: VideoPacket = change(number, packet) if change else packet
                        new.stream = stream
                        target.mux(new)
                        number += 1
    return buffer.getvalue()


def full_decode(content: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(content), "r") as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def just(indices: list[int], metadata: VideoMetadata) -> list[int]:
    return indices


def every(step: int) -> Callable[[VideoMetadata], list[int]]:
    return lambda metadata: list(range(0, metadata.total_num_frames, step))


def numbers(decoded: DecodedVideo) -> list[int]:
    return [number_of(frame) for frame in decoded.frames]


EVERY = every(1)


def refused(
    content: bytes, limits: VideoLimits = LIMITS, choose: Callable[[VideoMetadata], Iterable[int]] = EVERY
) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        decode_video(content, choose, limits=limits)
    assert caught.value.field == "media"
    return caught.value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind[:2]))
def test_chosen_frames_are_those_of_a_full_decode(kind: tuple[str, str, dict[str, str]]) -> None:
    content = made(*kind)
    everything = full_decode(content)
    assert [number_of(frame) for frame in everything] == list(range(40))
    for indices in ([0], [39], [0, 1, 2], [3, 17, 18, 38], [5, 5, 9], list(range(40))):
        decoded = decode_video(content, partial(just, indices), limits=LIMITS)
        np.testing.assert_array_equal(decoded.frames, [everything[index] for index in indices])
        assert decoded.frames.dtype == np.uint8
        assert decoded.metadata.frames_indices == indices
        assert decoded.metadata.total_num_frames == 40


def test_decoding_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    decode = video._decoded

    def spy(container: Any, stream: VideoStream, **others: Any) -> Any:
        seen.append(stream.codec_context.thread_count)
        return decode(container, stream, **others)

    monkeypatch.setattr(video, "_decoded", spy)
    decode_video(made(*KINDS[0]), every(3), limits=LIMITS)
    assert seen == [1]


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind[0] in ("mp4", "avi", "gif")], ids=lambda kind: "-".join(kind[:2])
)
@pytest.mark.parametrize("times_ms", [None, [40 * number + 7 * (number % 3) for number in range(40)]])
def test_frames_and_metadata_are_those_of_transformers(
    kind: tuple[str, str, dict[str, str]], times_ms: list[int] | None, tmp_path: Path
) -> None:
    content = made(*kind, times_ms=times_ms)
    path = tmp_path / "video"
    path.write_bytes(content)

    def sample(metadata: VideoMetadata, **_: Any) -> np.ndarray:
        return np.linspace(0, metadata.total_num_frames - 1, 7).round().astype(int)

    frames, metadata = load_video(str(path), backend="pyav", sample_indices_fn=sample)
    decoded = decode_video(content, sample, limits=LIMITS)
    np.testing.assert_array_equal(decoded.frames, frames)
    assert dict(decoded.metadata) | {"frames_indices": 0} == dict(metadata) | {"frames_indices": 0}
    assert decoded.metadata.frames_indices == list(metadata.frames_indices)


@pytest.mark.parametrize("file_format", ["mp4", "matroska"])
def test_variable_frame_rates_keep_the_order_of_frames(file_format: str) -> None:
    def prepare(stream: VideoStream) -> None:
        stream.codec_context.time_base = Fraction(1, 1000)

    times_ms = [0, 10, 400, 410, 420, 2000, 2040, 9000]
    content = made(file_format, num_frames=8, times_ms=times_ms, prepare=prepare)
    with av.open(io.BytesIO(content), "r") as container:
        assert [round(1000 * (frame.time or 0)) for frame in container.decode(video=0)] == times_ms
    decoded = decode_video(content, lambda metadata: [1, 2, 5, 7], limits=LIMITS)
    assert numbers(decoded) == [1, 2, 5, 7]


def test_metadata_given_to_the_sampler() -> None:
    seen = []

    def choose(metadata: VideoMetadata) -> list[int]:
        seen.append(dict(metadata))
        metadata.fps = 1000.0  # what a sampler does to it stays with the sampler
        return [0]

    decoded = decode_video(made("webm", "libvpx-vp9", num_frames=10), choose, limits=LIMITS)
    expected = {
        "total_num_frames": 10,
        "fps": 25.0,
        "width": 64,
        "height": 48,
        "duration": 0.4,
        "video_backend": "pyav",
    }
    assert seen == [expected | {"frames_indices": None}]
    assert dict(decoded.metadata) == expected | {"frames_indices": [0]}


@needs_h264
def test_a_fragmented_file_without_a_number_of_frames_is_counted() -> None:
    content = made("mp4", "libx264", {"bf": "2", "g": "8"}, muxer={"movflags": "frag_keyframe+empty_moov"})
    assert numbers(decode_video(content, every(7), limits=LIMITS)) == list(range(0, 40, 7))


def test_one_frame_is_a_video() -> None:
    for file_format, encoder in (("mp4", "mpeg4"), ("webm", "libvpx-vp9"), ("mpegts", "mpeg2video"), ("gif", "gif")):
        content = made(file_format, encoder, num_frames=1)
        assert numbers(decode_video(content, every(1), limits=LIMITS)) == [0]


def test_sound_beside_the_video_does_not_matter() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        sound: Any = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        pictures = add_video(container, "mpeg4", size=SIZE, options={})
        for number in range(10):
            frame = VideoFrame.from_ndarray(bars(number), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            container.mux(pictures.encode(frame))
            noise: Any = av.AudioFrame.from_ndarray(np.zeros((1, 320), dtype=np.int16), layout="mono")
            noise.sample_rate, noise.pts = 8000, number * 320
            container.mux(sound.encode(noise))
        container.mux(pictures.encode())
    assert numbers(decode_video(buffer.getvalue(), every(3), limits=LIMITS)) == [0, 3, 6, 9]


@needs_h264
def test_a_trimmed_file_has_the_frames_that_it_shows() -> None:
    """Edit lists hide frames that the header counts; a sampler that wants one of those chooses again."""
    content = made("mp4", "libx264", {"bf": "3", "g": "10"})

    def earlier(_: int, packet: VideoPacket) -> VideoPacket:
        ticks = int(15 / 25 / packet.time_base)
        assert packet.pts is not None
        assert packet.dts is not None
        packet.pts, packet.dts = packet.pts - ticks, packet.dts - ticks
        return packet

    trimmed = remuxed(content, file_format="mp4", change=earlier)
    totals = []

    def last(metadata: VideoMetadata) -> list[int]:
        totals.append(metadata.total_num_frames)
        return [0, metadata.total_num_frames - 1]

    decoded = decode_video(trimmed, last, limits=LIMITS)
    assert (totals, decoded.metadata.total_num_frames) == ([40, 25], 25)
    assert numbers(decoded) == [15, 39]
    assert decoded.metadata.duration == 1.0


@pytest.mark.skipif("libvpx" not in av.codecs_available, reason="PyAV came without a VP8 encoder")
@pytest.mark.parametrize("every_one", [False, True])
def test_packets_that_show_nothing_are_no_frames(every_one: bool) -> None:
    def hide(number: int, packet: VideoPacket) -> Any:
        content = bytearray(bytes(packet))
        content[0] &= ~0x10 if number == 7 or every_one else 0xFF  # the bit in the frame's tag that says it is shown
        hidden: Any = Packet(bytes(content))
        hidden.pts, hidden.dts, hidden.time_base = packet.pts, packet.dts, packet.time_base
        hidden.is_keyframe = packet.is_keyframe
        return hidden

    content = remuxed(made("webm", "libvpx"), file_format="webm", change=hide)
    if every_one:
        assert (refused(content).code, "no frame that" in refused(content).reason) == ("corrupt_video", True)
        return
    decoded = decode_video(content, every(5), limits=LIMITS)
    assert decoded.metadata.total_num_frames == 39
    assert numbers(decoded) == [0, 5, 11, 16, 21, 26, 31, 36]


@pytest.mark.parametrize(
    ("matrix", "turned"),
    [
        ((0, 1, -1, 0), lambda picture: np.rot90(picture, -1)),  # a phone held upright: by a quarter clockwise
        ((0, -1, 1, 0), lambda picture: np.rot90(picture, 1)),
        ((-1, 0, 0, -1), lambda picture: np.rot90(picture, 2)),
        ((1, 0, 0, 1), lambda picture: picture),
    ],
)
def test_frames_are_turned_as_the_file_says(
    matrix: tuple[int, int, int, int], turned: Callable[[np.ndarray], np.ndarray]
) -> None:
    a, b, c, d = (65536 * value for value in matrix)
    content = made(prepare=lambda stream: stream.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 2**30]))
    decoded = decode_video(content, lambda metadata: [3, 20], limits=LIMITS)
    everything = full_decode(content)
    np.testing.assert_array_equal(decoded.frames, [turned(everything[3]), turned(everything[20])])
    assert (decoded.metadata.height, decoded.metadata.width) == decoded.frames.shape[1:3]


# --- limits


def test_what_is_just_within_the_limits_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylens.preprocess.media.MAX_SOURCE_FRAMES", 20)
    content = made(num_frames=20)
    limits = VideoLimits(
        max_frames=20,
        max_frame_pixels=64 * 48,
        max_total_pixels=20 * 64 * 48,
        max_duration_s=0.8,
        max_source_pixels=20 * 64 * 48,
    )
    assert len(decode_video(content, every(1), limits=limits).frames) == 20


@pytest.mark.parametrize("file_format", ["mp4", "matroska"])
@pytest.mark.parametrize(
    ("limits", "code", "told"),
    [
        (VideoLimits(max_frames=19), "too_many_frames", ("20 frames", "19")),
        (VideoLimits(max_frame_pixels=64 * 48 - 1), "video_too_large", ("64x48", "3071")),
        (VideoLimits(max_total_pixels=20 * 64 * 48 - 1), "video_too_large", ("20 frames of 64x48", "61439")),
        (VideoLimits(max_duration_s=0.79), "video_too_long", ("0.8 s", "0.79 s")),
        (VideoLimits(max_source_pixels=20 * 64 * 48 - 1), "video_too_long", ("61440 pixels", "61439")),
    ],
)
def test_limits_are_named(file_format: str, limits: VideoLimits, code: str, told: tuple[str, ...]) -> None:
    error = refused(made(file_format, num_frames=20), limits=limits)
    assert error.code == code
    assert all(part in error.reason for part in told)


@pytest.mark.parametrize("file_format", ["mp4", "matroska"])
def test_a_video_of_too_many_frames_is_refused_before_frames_are_chosen(
    file_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raylens.preprocess.media.MAX_SOURCE_FRAMES", 19)
    error = refused(made(file_format, num_frames=20), choose=choose_nothing)
    assert error.code == "video_too_long"
    assert "more than 19 frames" in error.reason
    assert video._num_packets(made("matroska", num_frames=30), "matroska", limits=VideoLimits()) == 20


def choose_nothing(metadata: VideoMetadata) -> list[int]:
    pytest.fail("frames were chosen")


def test_long_videos_are_refused_before_frames_are_chosen() -> None:
    for limits in (
        *(VideoLimits(max_duration_s=0.1), VideoLimits(max_frame_pixels=9)),
        VideoLimits(max_source_pixels=9 * 64 * 48),
    ):
        for file_format in ("mp4", "matroska"):
            refused(made(file_format), limits=limits, choose=choose_nothing)


def test_too_many_pixels_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "_decoded", lambda *_, **__: pytest.fail("frames were decoded"))
    assert refused(made(), limits=VideoLimits(max_total_pixels=64 * 48 * 39)).code == "video_too_large"


def test_frames_larger_than_the_header_says_are_refused() -> None:
    """The decoder's own bound is wider than the limit, so that the frames are measured too."""
    small, large = made("matroska", "mjpeg", num_frames=1), made("matroska", "mjpeg", num_frames=9, size=(160, 96))
    content = remuxed(small, large, file_format="matroska", change=one_after_another)
    limits = VideoLimits(max_frame_pixels=64 * 48, max_total_pixels=2**20)
    assert refused(content, limits=limits, choose=lambda metadata: [4]).code == "video_too_large"
    assert refused(content, limits=VideoLimits(max_total_pixels=64 * 48 * 3), choose=lambda metadata: [4, 5]).code == (
        "video_too_large"
    )
    assert decode_video(content, lambda metadata: [4, 5], limits=LIMITS).frames.shape == (2, 96, 160, 3)


def test_all_frames_that_are_decoded_count_as_they_are() -> None:
    """Those before the first that is used, too, whatever size the header says."""
    small, large = made("matroska", "mjpeg", num_frames=1), made("matroska", "mjpeg", num_frames=9, size=(160, 96))
    content = remuxed(small, large, file_format="matroska", change=one_after_another)
    limits = VideoLimits(max_source_pixels=10 * 64 * 48)
    assert refused(content, limits=limits, choose=lambda metadata: [9]).code == "video_too_long"


def test_decoders_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header can lie about the size: the frame itself must not be allocated to find that out."""
    monkeypatch.setattr(video, "_check_size", lambda *_, **__: None)
    content = made(size=(2560, 1728), num_frames=1)
    assert decode_video(content, every(1), limits=LIMITS).frames.shape[1:3] == (1728, 2560)
    assert refused(content, limits=VideoLimits(max_frame_pixels=1000)).code == "invalid_video"


def test_opening_decodes_within_bounds() -> None:
    """FFmpeg decodes a little to complete a header; what it must not decode stays unknown."""

    def pixel_format(content: bytes, limits: VideoLimits) -> str | None:
        with video._opened(content, "matroska", limits=limits) as container:
            return container.streams.video[0].codec_context.pix_fmt

    content = made("matroska", "mjpeg", size=(2560, 1728), num_frames=1)
    assert pixel_format(content, limits=LIMITS) == "yuvj420p"
    assert pixel_format(content, limits=VideoLimits(max_frame_pixels=1000)) is None
    assert pixel_format(made("matroska", "ffv1", num_frames=1), limits=LIMITS) is None


def test_streams_are_bounded() -> None:
    """Each that a file declares would take a decoder."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        streams = [add_video(container, "mjpeg", size=SIZE, options={}) for _ in range(40)]
        for stream in streams:
            container.mux(stream.encode(VideoFrame.from_ndarray(bars(3), format="rgb24")))
    with video._opened(buffer.getvalue(), "matroska", limits=LIMITS) as opened:
        assert len(opened.streams) == 32
    assert numbers(decode_video(buffer.getvalue(), EVERY, limits=LIMITS)) == [3]


def test_a_change_of_size_is_refused() -> None:
    small, large = made("matroska", "mjpeg", num_frames=3), made("matroska", "mjpeg", num_frames=3, size=(96, 48))
    content = remuxed(small, large, file_format="matroska", change=one_after_another)
    error = refused(content)
    assert (error.code, "frame 3" in error.reason) == ("invalid_video", True)
    assert numbers(decode_video(content, lambda metadata: [0, 2], limits=LIMITS)) == [0, 2]


def one_after_another(number: int, packet: VideoPacket) -> VideoPacket:
    packet.pts = packet.dts = int(number / 25 / packet.time_base)
    return packet


# --- what samplers choose


@pytest.mark.parametrize("indices", [[], [40], [-1, 3], [3, 2], [0, 39, 40]])
def test_frames_that_are_not_there_are_refused(indices: list[int]) -> None:
    assert refused(made(), choose=lambda metadata: indices).code == "invalid_frames"


def test_a_sampler_that_takes_no_such_video_is_the_clients_matter() -> None:
    def choose(metadata: VideoMetadata) -> list[int]:
        raise ValueError("internals of a sampler")

    error = refused(made(num_frames=3), choose=choose)
    assert error.code == "invalid_frames"
    assert "3 frames" in error.reason
    assert "internals" not in error.reason


def test_a_broken_sampler_is_not_the_clients_matter() -> None:
    def choose(metadata: VideoMetadata) -> list[int]:
        raise KeyError("num_frames")

    with pytest.raises(KeyError):
        decode_video(made(), choose, limits=LIMITS)


# --- bytes that are no video


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"just some text" * 100,
        b"\0" * 1000,
        random.Random(0).randbytes(10_000),
        encoded(disc("red")),
        encoded(disc("red"), "JPEG"),
        b"RIFF\x10\0\0\0WAVEfmt ",
        b"\x1aE\xdf\xa3",
        b"\0\0\0\x10ftypisom\0\0\0\0",
        b"GIF89a;",
        b"G" * 2000,
    ],
    ids=["empty", "text", "zeros", "random", "png", "jpeg", "wave", "ebml", "ftyp", "gif", "ts"],
)
def test_what_is_no_video_is_refused(content: bytes) -> None:
    error = refused(content)
    assert error.code == "invalid_video"
    assert str(len(content)) in error.reason or "no movie header" in error.reason


def test_a_picture_in_boxes_is_no_video() -> None:
    content = b"\0\0\0\x10ftypavif\0\0\0\0" + b"\0\0\0\x08mdat"
    assert "no movie header" in refused(content).reason


def test_titles_in_another_encoding_do_not_matter() -> None:
    content = made("matroska")
    assert content.count(b"Lavf") >= 1
    assert numbers(decode_video(content.replace(b"Lavf", b"\xff\xfe\xfa\xfb"), every(20), limits=LIMITS)) == [0, 20]


def test_sound_alone_has_no_video_stream() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        sound: Any = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        noise: Any = av.AudioFrame.from_ndarray(np.zeros((1, 320), dtype=np.int16), layout="mono")
        noise.sample_rate = 8000
        container.mux(sound.encode(noise))
    assert "no video stream" in refused(buffer.getvalue()).reason


def test_a_cover_picture_is_no_video(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        cover = add_video(container, "mjpeg", size=SIZE, options={})
        cover.disposition = av.stream.Disposition.attached_pic
        container.mux(cover.encode(VideoFrame.from_ndarray(bars(1), format="rgb24")))
        container.mux(cover.encode())
    assert refused(buffer.getvalue()).code in ("invalid_video", "corrupt_video")


def test_other_codecs_are_named() -> None:
    error = refused(made("matroska", "ffv1", num_frames=2))
    assert error.code == "invalid_video"
    assert "ffv1" in error.reason


@pytest.mark.parametrize("file_format", ["mp4", "matroska", "avi"])
def test_a_video_without_frames_is_refused(file_format: str) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=file_format) as container:
        add_video(container, "mpeg4", size=SIZE, options={})
        container.start_encoding()
    assert refused(buffer.getvalue(), choose=choose_nothing).code in ("corrupt_video", "invalid_video")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind[:2]))
@pytest.mark.parametrize("share", [0.2, 0.6, 0.97])
def test_a_file_that_is_cut_off_is_refused(kind: tuple[str, str, dict[str, str]], share: float) -> None:
    if kind[0] == "mpegts":
        pytest.skip("a transport stream does not say where it ends")
    content = made(*kind)
    error = refused(content[: int(share * len(content))], choose=lambda metadata: [0])
    assert error.code == "corrupt_video"
    assert str(int(share * len(content))) in error.reason


def test_a_file_that_begins_with_its_tables_is_refused_when_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    with (
        av.open(io.BytesIO(made()), "r") as source,
        av.open(str(path), "w", options={"movflags": "faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    content = path.read_bytes()
    assert numbers(decode_video(content, every(13), limits=LIMITS)) == [0, 13, 26, 39]
    assert refused(content[:-3], choose=lambda metadata: [0, 39]).code == "corrupt_video"


@needs_h264
def test_damage_in_the_middle_is_refused() -> None:
    content = bytearray(made("mp4", "libx264", {"bf": "0", "preset": "ultrafast"}))
    with av.open(io.BytesIO(bytes(content)), "r") as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][20]
        assert packet.pos is not None
        content[packet.pos + 6 : packet.pos + packet.size] = b"\xa5" * (packet.size - 6)
    error = refused(bytes(content))
    assert (error.code, error.reason) == ("corrupt_video", "the video is damaged at frame 20")
    # The damage is behind the frames that are used.
    assert numbers(decode_video(bytes(content), lambda metadata: [0, 10], limits=LIMITS)) == [0, 10]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind[:2]))
def test_no_bytes_raise_anything_else(kind: tuple[str, str, dict[str, str]]) -> None:
    chance = random.Random(0)
    content = made(*kind, num_frames=8)
    reasons: list[str] = []
    for trial in range(120):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 3, 30))):
            # Half of the damage to the first bytes, where the tables of most formats are; MP4 has them last.
            places = chance.choice((len(content), min(300, len(content))))
            damaged[chance.randrange(places) * (1 if trial % 2 else -1)] = chance.randrange(256)
        try:
            decoded = decode_video(bytes(damaged), every(1), limits=VideoLimits(max_source_pixels=100 * 64 * 48))
        except InvalidRequestError as error:
            reasons.append(error.reason)
        else:
            assert len(decoded.frames) == len(decoded.metadata.frames_indices)
    assert reasons
    assert not any("Errno" in reason or "avcodec" in reason for reason in reasons)


@pytest.mark.parametrize("table", ["stsz", "trun", "elst", "cmov"])
def test_tables_of_samples_that_take_no_bytes_are_refused(table: str) -> None:
    """A file of some kilobytes could make the demuxer's index take all memory there is."""
    muxer = {"movflags": "frag_keyframe+empty_moov"} if table == "trun" else {}
    content = bytearray(made(muxer=muxer))
    if table == "cmov":
        at = content.index(b"mvhd")
        content[at : at + 4] = b"cmov"
    else:
        at = content.index(table.encode())
        offset = 12 if table == "stsz" else 8
        content[at + offset : at + offset + 4] = struct.pack(">I", 6_000_000)
    if table == "stsz":
        content[at + 8 : at + 12] = struct.pack(">I", 1)
    error = refused(bytes(content))
    assert error.code == ("invalid_video" if table == "cmov" else "video_too_long")
    assert ("compressed header" if table == "cmov" else "5000000") in error.reason


def test_tables_with_long_sizes_are_read_as_demuxers_do() -> None:
    content = bytearray(made(muxer={"movflags": "frag_keyframe+empty_moov"}))
    at = content.index(b"trun")
    content[at - 4 : at] = struct.pack(">I", 1)
    content[at + 16 : at + 20] = struct.pack(">I", 6_000_000)
    assert refused(bytes(content)).code == "video_too_long"


def test_media_data_that_looks_like_tables_does_not_matter() -> None:
    table = b"stsz" + bytes(8) + b"\xff" * 4
    assert len(decode_video(made() + struct.pack(">I", 8 + len(table)) + b"mdat" + table, EVERY, limits=LIMITS).frames)


# --- other files


class OpenWatch:
    """Tells whether a file was opened, by Linux's inotify: FFmpeg opens files without Python noticing."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(_IN_NONBLOCK)
        assert libc.inotify_add_watch(self.descriptor, os.fsencode(path), _IN_OPEN) >= 0

    def saw_an_opening(self) -> bool:
        try:
            return bool(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return False


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real video in the working directory, for playlists to name."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "named.ts"
    path.write_bytes(made("mpegts"))
    return path


def playlists(path: Path) -> dict[str, bytes]:
    concat = f"ffconcat version 1.0\nfile {path.name}\n".encode()
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{path.as_uri()}\n#EXT-X-ENDLIST\n".encode()
    dash = (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
        f'mediaPresentationDuration="PT2S"><Period><AdaptationSet mimeType="video/mp2t"><Representation id="1">'
        f"<BaseURL>{path.as_uri()}</BaseURL></Representation></AdaptationSet></Period></MPD>"
    ).encode()
    return {"concat": concat, "hls": hls, "dash": dash, "sdp": b"v=0\nm=video 5004 RTP/AVP 96\n"}


@pytest.mark.parametrize("kind", ["concat", "hls", "dash", "sdp"])
def test_playlists_are_refused_and_what_they_name_stays_closed(kind: str, named: Path) -> None:
    watch = OpenWatch(named)
    assert refused(playlists(named)[kind]).code == "invalid_video"
    assert not watch.saw_an_opening()


def test_without_these_guards_the_named_file_is_opened(named: Path) -> None:
    """What the tests around this one rely on: the playlist works, and the watch sees it work."""
    watch = OpenWatch(named)
    with av.open(io.BytesIO(playlists(named)["concat"]), "r") as container:
        assert container.format.name == "concat"
        assert len(list(container.decode(video=0))) == 40
    assert watch.saw_an_opening()


@pytest.mark.parametrize("guard", ["format_whitelist", "protocol_whitelist", None])
def test_each_guard_refuses_by_itself(guard: str | None, named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the look at the first bytes out of the way and only one of the two lists left, or none."""
    opened: Any = av.open

    def open_with_one_guard(*arguments: Any, options: dict[str, str], **others: Any) -> Any:
        assert {"format_whitelist", "protocol_whitelist"} <= options.keys()
        return opened(*arguments, options={guard: options[guard]} if guard else {}, **others)

    watch = OpenWatch(named)
    monkeypatch.setattr(MediaKind, "checked_format", lambda kind, content: "concat")
    monkeypatch.setattr(av, "open", open_with_one_guard)
    if guard:
        assert refused(playlists(named)["concat"]).code == "invalid_video"
    else:
        assert len(decode_video(playlists(named)["concat"], EVERY, limits=LIMITS).frames) == 40
    assert watch.saw_an_opening() == (guard is None)


def test_animated_gifs_of_pillow_are_videos() -> None:
    pictures = [Image.fromarray(bars(number)) for number in range(5)]
    content = encoded(pictures[0], "GIF", save_all=True, append_images=pictures[1:], duration=[50, 200, 300, 50, 50])
    assert numbers(decode_video(content, every(2), limits=LIMITS)) == [0, 2, 4]
