"""Decodes sounds to one channel at a model's rate, in memory bounded by `AudioLimits`.

Only the processors of models that hear import this module, because it imports PyAV. `preprocess/containers.py` opens
the files."""

from collections.abc import Iterator
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from raylens.preprocess.containers import MediaKind
from raylens.preprocess.media import MIN_AUDIO_SECONDS, AudioLimits
from raylens.preprocess.schema import invalid_media

_AUDIO = MediaKind(
    "audio",
    formats=("wav", "mp3", "flac", "ogg", "mov", "matroska", "aac"),  # mov also reads M4A, matroska also WebM
    for_people="WAV, MP3, FLAC, Ogg, M4A, WebM or AAC",
    decoders=(
        *("mp3float", "mp3", "flac", "vorbis", "opus", "libopus", "aac", "alac"),
        *("pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le", "pcm_alaw", "pcm_mulaw"),
    ),
)
_RATES = (4_000, 384_000)
"""The least and the most samples per second of a file. Resampling a lower rate would multiply its samples."""
_MAX_CHANNELS = 8
_MAX_AMPLITUDE = 2.0**16
"""Full scale is 1. Files of floating-point samples may go beyond, some up to the scale of 16-bit samples."""
_LEAST_PART_OF_DECLARED = 0.9
_PACKETS_PER_SECOND = 400
"""Of the longest sound: Opus' shortest packets last 2.5 ms. Each costs some 20 microseconds, if it has one sample only,
too."""


def decode_audio(content: bytes, *, sampling_rate: int, limits: AudioLimits) -> NDArray[np.float32]:
    """Returns the samples (num_samples,) of the first sound of a file, its channels averaged, at `sampling_rate`.

    Raises InvalidRequestError for bytes that are no such sound, are damaged or cut off, or exceed `limits`."""
    file_format = _AUDIO.checked_format(content)
    with _AUDIO.refusing(content), _AUDIO.opened(content, file_format) as container:
        stream = _audio_stream(container)
        rate = stream.codec_context.sample_rate
        pieces: list[NDArray[np.float32]] = []
        num_samples = 0
        for piece in _resampled(_averaged(container, stream, limits=limits), rate, sampling_rate):
            pieces.append(piece)
            num_samples += len(piece)
        declared = float((stream.duration or 0) * (stream.time_base or 0)) if file_format == "flac" else 0.0
    seconds = num_samples / sampling_rate
    if seconds < declared * _LEAST_PART_OF_DECLARED:
        raise _AUDIO.corrupt(f"is cut off: it declares {declared:.2f} s and has {seconds:.2f} s")
    if seconds < MIN_AUDIO_SECONDS:
        raise invalid_media(f"the audio is {seconds:.2f} s long, the least is {MIN_AUDIO_SECONDS} s", "audio_too_short")
    samples = np.concatenate(pieces)
    if not np.abs(samples).max() <= _MAX_AMPLITUDE:  # no comparison with NaN holds
        raise _AUDIO.invalid(f"the audio has samples beyond {_MAX_AMPLITUDE:g} times full scale, or not finite")
    return samples


def _audio_stream(container: InputContainer) -> AudioStream:
    """Returns the first stream of sound. Raises InvalidRequestError if there is none, or none that can be decoded."""
    if not container.streams.audio:
        raise _AUDIO.invalid("the file has no audio stream")
    stream = container.streams.audio[0]
    codec = stream.codec_context
    _AUDIO.check_decoder(codec.name)
    if not _RATES[0] <= codec.sample_rate <= _RATES[1]:
        reason = f"the audio has {codec.sample_rate} samples a second, the limits are {_RATES[0]} and {_RATES[1]}"
        raise _AUDIO.invalid(reason)
    if codec.channels > _MAX_CHANNELS:
        raise _AUDIO.invalid(f"the audio has {codec.channels} channels, the limit is {_MAX_CHANNELS}")
    codec.thread_count = 1
    return stream


def _averaged(container: InputContainer, stream: AudioStream, *, limits: AudioLimits) -> Iterator[NDArray[np.float32]]:
    """Yields each frame as the mean of its channels, (num_samples,)."""
    rate, num_samples = stream.codec_context.sample_rate, 0
    for frame in _frames(container, stream, max_packets=int(limits.max_duration_s * _PACKETS_PER_SECOND)):
        num_samples += frame.samples
        if num_samples > limits.max_duration_s * rate:
            reason = f"the audio is longer than {limits.max_duration_s:g} s, the limit"
            raise invalid_media(reason, "audio_too_long")
        if num_samples * len(frame.layout.channels) > limits.max_source_samples:
            reason = f"the channels of the audio have more than {limits.max_source_samples} samples in all, the limit"
            raise invalid_media(reason, "audio_too_long")
        if frame.sample_rate != rate:
            raise _AUDIO.invalid(f"the audio changes its rate from {rate} to {frame.sample_rate} samples a second")
        yield _floating(frame).mean(axis=0, dtype=np.float32)


def _frames(container: InputContainer, stream: AudioStream, *, max_packets: int) -> Iterator[AudioFrame]:
    """Yields the frames. Many MP3 files have other bytes behind their last frame, which players skip."""
    unread: av.InvalidDataError | None = None
    for num_before, packet in enumerate(container.demux(stream)):
        if num_before >= max_packets and packet.size:  # the last one is empty, and flushes the decoder
            raise invalid_media(f"the audio has more than {max_packets} packets, the limit", "audio_too_long")
        try:
            frames = packet.decode()
        except av.InvalidDataError as error:
            unread, frames = error, []
        if unread is not None and (frames or not stream.codec_context.name.startswith("mp3")):
            raise unread
        yield from frames


def _floating(frame: AudioFrame) -> NDArray[np.float32]:
    """Returns the samples (num_channels, num_samples), where full scale is 1."""
    samples: NDArray[Any] = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(frame.samples, -1).T
    kind, num_bytes = samples.dtype.kind, samples.dtype.itemsize
    floating = samples.astype(np.float32)
    if kind == "u":  # of one byte
        return floating / np.float32(128) - np.float32(1)
    return floating / np.float32(2 ** (8 * num_bytes - 1)) if kind == "i" else floating


def _resampled(pieces: Iterator[NDArray[np.float32]], rate: int, target_rate: int) -> Iterator[NDArray[np.float32]]:
    if rate == target_rate:
        yield from pieces
        return
    resampler = av.AudioResampler(format="flt", layout="mono", rate=target_rate)
    for piece in pieces:
        frame = AudioFrame.from_ndarray(piece[None], format="flt", layout="mono")
        frame.sample_rate = rate
        yield from _samples_of(resampler.resample(frame))
    yield from _samples_of(resampler.resample(None))


def _samples_of(frames: list[AudioFrame]) -> Iterator[NDArray[np.float32]]:
    for frame in frames:
        yield frame.to_ndarray()[0]
