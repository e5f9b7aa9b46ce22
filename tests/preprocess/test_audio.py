"""Sounds made on the spot to samples: the right ones, within limits, and from the given bytes alone."""

import io
import struct
import wave
from fractions import Fraction

import av
import numpy as np
import pytest

from raylens.preprocess.audio import decode_audio
from raylens.preprocess.media import AudioLimits
from raylens.preprocess.schema import InvalidRequestError
from tests.pictures import disc, encoded
from tests.preprocess.test_video import made
from tests.sounds import RATE, noise, recorded, tone

LIMITS = AudioLimits()

# (container, encoder, samples a second, the most that a sample may differ)
KINDS = [
    ("wav", "pcm_s16le", 16_000, 1e-4),
    ("wav", "pcm_s16le", 48_000, 1e-4),
    ("wav", "pcm_u8", 8_000, 1e-2),
    ("wav", "pcm_s24le", 44_100, 1e-4),
    ("wav", "pcm_s32le", 22_050, 1e-4),
    ("wav", "pcm_f32le", 44_100, 1e-4),
    ("wav", "pcm_f64le", 96_000, 1e-4),
    ("wav", "pcm_mulaw", 8_000, 2e-2),
    ("mp3", "libmp3lame", 44_100, 4e-2),
    ("flac", "flac", 48_000, 1e-4),
    ("ogg", "libopus", 48_000, 2e-2),
    ("webm", "libopus", 48_000, 2e-2),
    ("mp4", "alac", 44_100, 1e-4),
    ("mov", "pcm_alaw", 8_000, 2e-2),
]
KINDS = [kind for kind in KINDS if kind[1] in av.codecs_available]
IDS = ["-".join(map(str, kind[:3])) for kind in KINDS]


def empty_wav() -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
    return buffer.getvalue()


def decoded(content: bytes, limits: AudioLimits = LIMITS) -> np.ndarray:
    return decode_audio(content, sampling_rate=RATE, limits=limits)


def refused(content: bytes, limits: AudioLimits = LIMITS) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        decoded(content, limits)
    assert caught.value.field == "media"
    return caught.value


@pytest.mark.parametrize(("file_format", "encoder", "rate", "tolerance"), KINDS, ids=IDS)
def test_a_sound_comes_as_the_mean_of_its_channels_at_the_rate_of_the_model(
    file_format: str, encoder: str, rate: int, tolerance: float
) -> None:
    left = tone(1.0, rate)
    content = recorded(left, 0.5 * left, file_format=file_format, encoder=encoder, rate=rate)
    samples = decoded(content)
    assert samples.dtype == np.float32
    assert abs(len(samples) - RATE) <= 1
    inner = slice(800, 15_000)  # encoders and resamplers change the edges
    np.testing.assert_allclose(samples[inner], 0.75 * tone(1.0)[inner], atol=tolerance)


def test_samples_of_the_rate_of_the_model_stay_as_they_are() -> None:
    sound = noise(0.5)
    np.testing.assert_array_equal(decoded(recorded(sound, encoder="pcm_f32le")), sound)


def test_what_a_lower_rate_cannot_hold_is_filtered_out() -> None:
    """A plain choice of every third sample would fold 15 kHz to 1 kHz."""
    assert np.abs(decoded(recorded(tone(1.0, 48_000, pitch=15_000.0), rate=48_000))[800:-800]).max() < 1e-3


def test_the_first_sound_of_a_file_with_pictures_is_taken() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        pictures = container.add_stream("mjpeg", rate=25)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuvj420p"
        sound = container.add_stream("pcm_s16le", rate=RATE, layout="mono")
        frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
        container.mux(pictures.encode(frame))
        samples = av.AudioFrame.from_ndarray((tone(0.5)[None] * 32767).astype(np.int16), layout="mono")
        samples.sample_rate = RATE
        container.mux(sound.encode(samples))
    np.testing.assert_allclose(decoded(buffer.getvalue()), tone(0.5), atol=1e-3)


def test_an_mp3_with_titles_and_a_cover_is_read() -> None:
    sound = recorded(tone(1.0, 44_100), file_format="mp3", encoder="libmp3lame", rate=44_100)
    picture = b"\0image/png\0\3\0" + encoded(disc("red"))
    frame = b"APIC" + struct.pack(">IH", len(picture), 0) + picture
    size = bytes(len(frame) >> shift & 0x7F for shift in (21, 14, 7, 0))
    with_cover = b"ID3\3\0\0" + size + frame + sound[sound.index(b"\xff\xfb") :] + b"TAG" + bytes(125)
    assert abs(len(decoded(with_cover)) - RATE) < 1500


@pytest.mark.parametrize("behind", [bytes(4000), b"x" * 500, b"APETAGEX" + bytes(200), noise(0.1).tobytes()])
def test_what_follows_the_last_frame_of_an_mp3_is_skipped(behind: bytes) -> None:
    content = recorded(tone(1.0, 44_100), file_format="mp3", encoder="libmp3lame", rate=44_100)
    assert abs(len(decoded(content + behind)) - RATE) < 500


def test_an_mp3_that_is_damaged_in_its_middle_is_refused() -> None:
    content = bytearray(recorded(tone(1.0, 44_100), file_format="mp3", encoder="libmp3lame", rate=44_100))
    content[5000:8000] = bytes(3000)
    assert refused(bytes(content)).code == "invalid_audio"


@pytest.mark.parametrize("size", [0, 0xFFFF_FFFF])
def test_a_wav_written_as_a_stream_declares_no_size(size: int) -> None:
    content = bytearray(recorded(tone(0.5)))
    data = content.index(b"data")
    content[4:8] = content[data + 4 : data + 8] = struct.pack("<I", size)
    found = decoded(bytes(content)) if size else content
    assert len(found) in (RATE // 2, len(content))


def test_a_sound_that_changes_its_rate_is_refused() -> None:
    low, high = (
        recorded(tone(1.0, rate), file_format="mp3", encoder="libmp3lame", rate=rate) for rate in (32_000, 48_000)
    )
    assert "changes its rate from" in refused(low + high).reason


def test_silence_is_a_sound() -> None:
    assert not decoded(recorded(np.zeros(RATE, np.float32))).any()


@pytest.mark.parametrize(("file_format", "encoder", "rate", "tolerance"), KINDS, ids=IDS)
def test_a_file_that_is_cut_off_is_refused(file_format: str, encoder: str, rate: int, tolerance: float) -> None:
    content = recorded(tone(3.0, rate), file_format=file_format, encoder=encoder, rate=rate)
    for part in (0.5, 0.7):
        cut = content[: round(len(content) * part)]
        if file_format == "mp3":  # declares no size
            assert abs(len(decoded(cut)) / RATE / 3 - part) < 0.1
        else:
            assert refused(cut).code in ("corrupt_audio", "invalid_audio")


def test_a_flac_that_is_cut_off_between_two_frames_is_refused() -> None:
    content = recorded(noise(1.0), file_format="flac", encoder="flac")
    marks = [at for at in range(len(content)) if content[at : at + 2] == b"\xff\xf8"]
    error = refused(content[: marks[len(marks) // 2]])
    assert error.code == "corrupt_audio"
    assert "declares 1.00 s" in error.reason


@pytest.mark.parametrize(
    ("content", "code", "told"),
    [
        (b"", "invalid_audio", "0 bytes"),
        (b"\xff", "invalid_audio", "1 bytes"),
        (bytes(1000), "invalid_audio", "WAV, MP3, FLAC, Ogg, M4A, WebM or AAC"),
        (encoded(disc("red")), "invalid_audio", "WAV, MP3"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "invalid_audio", "WAV, MP3"),
        (made("mp4"), "invalid_audio", "no audio stream"),
        (recorded(tone(0.05)), "audio_too_short", "0.05 s long, the least is 0.1 s"),
        (empty_wav(), "audio_too_short", "0.00 s long"),
        (recorded(tone(1.0, 2_000), rate=2_000), "invalid_audio", "2000 samples a second, the limits are 4000 and"),
        (recorded(np.full(RATE, np.nan, np.float32), encoder="pcm_f32le"), "invalid_audio", "not finite"),
        (recorded(np.full(RATE, 1e30, np.float32), encoder="pcm_f32le"), "invalid_audio", "times full scale"),
        (recorded(tone(1.0), encoder="adpcm_ms"), "invalid_audio", "codec, adpcm_ms, is not one of"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_is_no_sound_is_refused_with_its_reason(content: bytes, code: str, told: str) -> None:
    error = refused(content)
    assert error.code == code
    assert told in error.reason


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_a_sound_over_the_limit_of_seconds_is_refused_before_it_is_decoded_to_its_end(kind: str) -> None:
    content = recorded(tone(3.0), file_format=kind, encoder={"wav": "pcm_s16le", "flac": "flac"}[kind])
    assert len(decoded(content, AudioLimits(max_duration_s=3.0))) == 3 * RATE
    error = refused(content, AudioLimits(max_duration_s=2.9))
    assert error.code == "audio_too_long"
    assert "longer than 2.9 s, the limit" in error.reason


def test_samples_of_all_channels_are_bounded() -> None:
    """A second of silence at a high rate takes a few bytes and long to decode."""
    content = recorded(*[np.zeros(96_000, np.float32)] * 2, file_format="flac", encoder="flac", rate=96_000)
    assert len(content) < 10_000
    assert len(decoded(content, AudioLimits(max_source_samples=2 * 96_000))) == RATE
    error = refused(content, AudioLimits(max_source_samples=2 * 96_000 - 1))
    assert error.code == "audio_too_long"
    assert "191999 samples in all" in error.reason


@pytest.mark.parametrize(("num_samples", "is_taken"), [(400, True), (401, False)])
def test_packets_are_bounded(num_samples: int, is_taken: bool) -> None:
    """A file of many packets of a sample each takes a few bytes a packet, and long to decode."""
    content = in_single_samples(num_samples, rate=4000)
    limits = AudioLimits(max_duration_s=1.0)
    if is_taken:
        assert len(decoded(content, limits)) == pytest.approx(num_samples * RATE / 4000, abs=1)
    else:
        error = refused(content, limits)
        assert error.code == "audio_too_long"
        assert "more than 400 packets" in error.reason


def in_single_samples(num_samples: int, rate: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=rate, layout="mono")
        for place in range(num_samples):
            packet = av.Packet(bytes(2))
            packet.stream, packet.time_base = stream, Fraction(1, rate)
            packet.pts = packet.dts = place
            container.mux(packet)
    return buffer.getvalue()


HOSTILE = ((12, struct.pack("<I", 2**31 - 1)), (10, struct.pack("<H", 300)))
"""Bytes of a WAV's format: samples a second, channels."""


def test_a_header_may_not_ask_for_more_than_it_has() -> None:
    for at, value in HOSTILE:
        content = bytearray(recorded(tone(1.0)))
        start = content.index(b"fmt ") + at
        content[start : start + len(value)] = value
        assert refused(bytes(content)).code == "invalid_audio"
