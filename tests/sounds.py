"""Sounds made on the spot."""

import io
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame

RATE = 16_000


def tone(seconds: float, rate: int = RATE, pitch: float = 440.0) -> np.ndarray:
    """A sine with a slow beat (num_samples,) of float32, at most 0.5."""
    times = np.arange(round(seconds * rate)) / rate
    beat = 0.75 + 0.25 * np.sin(2 * np.pi * 3 * times)
    return (0.5 * beat * np.sin(2 * np.pi * pitch * times)).astype(np.float32)


def noise(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.uniform(-0.5, 0.5, round(seconds * rate)).astype(np.float32)


def recorded(
    *channels: np.ndarray, file_format: str = "wav", encoder: str = "pcm_s16le", rate: int = RATE, **options: Any
) -> bytes:
    """An audio file of one, two or six channels."""
    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(channels)]
    with av.open(buffer, "w", format=file_format, options=options) as container:
        stream: Any = container.add_stream(encoder, rate=rate, layout=layout)
        frame = AudioFrame.from_ndarray(np.stack(channels), format="fltp", layout=layout)
        frame.sample_rate = rate
        resampler = av.AudioResampler(stream.format, layout, rate, frame_size=stream.codec_context.frame_size or 1024)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return buffer.getvalue()
