"""Real media files with damage, and what begins like one: what comes out is a result or an InvalidRequestError.

In the normal run a fixed number of fixed examples; the slow run takes minutes and new examples each time.
"""

import asyncio
import logging
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from raylens.preprocess.audio import decode_audio
from raylens.preprocess.data_url import DataUrl, data_url
from raylens.preprocess.media import AudioLimits, MediaLimits, VideoLimits, decode_image
from raylens.preprocess.pixel_count import work_pixels
from raylens.preprocess.precomputed import read_precomputed
from raylens.preprocess.schema import InvalidRequestError
from raylens.preprocess.video import decode_video
from tests.pictures import encoded
from tests.preprocess.test_audio import KINDS as SOUNDS
from tests.preprocess.test_video import KINDS, every, made
from tests.sounds import recorded, tone

LIMITS = MediaLimits(
    max_item_bytes=200_000,
    max_image_pixels=100_000,
    video=VideoLimits(max_frames=20, max_frame_pixels=100_000, max_total_pixels=400_000, max_source_pixels=400_000),
    audio=AudioLimits(max_duration_s=10.0),
)
SECONDS = 5.0
"""For one example; the slowest takes some hundredths."""

QUICK = settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
LONG = settings(QUICK, max_examples=10_000, derandomize=False, phases=[Phase.generate, Phase.shrink])

ODD_BYTES = [
    *(b"\0", b"\xff", b"\x7f", b"\x80", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"),
    *(b"\xff\xd8", b"\xff\xda"),  # begin a JPEG and one of its scans
]


@cache
def pictures() -> list[bytes]:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 56, 4), np.uint8), "RGBA")
    plain = noise.convert("RGB")
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "text"
    more: dict[str, Any] = {"save_all": True, "append_images": [noise.rotate(90), noise.rotate(180)]}
    plain_more: dict[str, Any] = {"save_all": True, "append_images": [plain.rotate(90)]}
    return [
        *(encoded(noise), encoded(plain, icc_profile=bytes(300), exif=exif), encoded(noise, **more)),
        *(encoded(plain.convert("P"), transparency=3), encoded(plain.convert("1")), encoded(plain.convert("I;16"))),
        *(encoded(plain, "JPEG", exif=exif), encoded(plain, "JPEG", progressive=True, icc_profile=bytes(300))),
        *(
            encoded(plain.convert("CMYK"), "JPEG"),
            encoded(plain.convert("L"), "JPEG"),
            encoded(plain, "MPO", **plain_more),
        ),
        *(encoded(plain, "WEBP"), encoded(noise, "WEBP", lossless=True, exif=exif), encoded(noise, "WEBP", **more)),
        *(encoded(plain.convert("P"), "GIF"), encoded(plain, "GIF", comment=b"text", **plain_more)),
        *(encoded(plain, "BMP"), encoded(plain.convert("P"), "BMP"), encoded(plain.convert("1"), "BMP")),
    ]


@cache
def videos() -> list[bytes]:
    return [made(*kind, num_frames=6) for kind in KINDS]


@cache
def sounds() -> list[bytes]:
    return [
        recorded(tone(0.3, rate), file_format=kind, encoder=encoder, rate=rate) for kind, encoder, rate, _ in SOUNDS
    ]


@cache
def tensor_files() -> list[bytes]:
    size = torch.tensor([48, 64])
    return [
        save({"size": size, "embeddings": torch.zeros(4, 8)}),
        save({"size": size, "pixel_values": torch.zeros(3, 8, 8), "grid": torch.tensor([[1, 2, 3]])}, {"key": "value"}),
    ]


@cache
def data_urls() -> list[bytes]:
    return [data_url(content).encode() for content in pictures()[:3]]


@st.composite
def damaged(draw: st.DrawFn, originals: Callable[[], list[bytes]]) -> bytes:
    """One of the files with bytes overwritten, put in, taken out, repeated or cut off; half of it near the start."""
    content = bytearray(draw(st.sampled_from(originals())))
    for _ in range(draw(st.integers(1, 6))):
        last = len(content) if draw(st.booleans()) else min(len(content), 200)
        at = draw(st.integers(0, last))
        piece = draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(ODD_BYTES)))
        match draw(st.sampled_from(["overwrite", "overwrite", "insert", "delete", "repeat", "cut"])):
            case "overwrite":
                content[at : at + len(piece)] = piece
            case "insert":
                content[at:at] = piece
            case "delete":
                del content[at : at + draw(st.integers(1, 64))]
            case "repeat":
                content[at:at] = content[at : at + draw(st.integers(1, 64))] * draw(st.integers(1, 50))
            case "cut":
                del content[at:]
    return bytes(content)


def picture_comes(content: bytes) -> None:
    work_pixels("image", content, LIMITS)
    image = decode_image(content, LIMITS)
    assert image.mode == "RGB"
    assert image.width * image.height <= LIMITS.max_image_pixels
    assert len(image.tobytes()) == 3 * image.width * image.height


def video_comes(content: bytes) -> None:
    decoded = decode_video(content, every(1), limits=LIMITS.video)
    assert decoded.frames.size <= 3 * LIMITS.video.max_total_pixels


def sound_comes(content: bytes) -> None:
    samples = decode_audio(content, sampling_rate=16_000, limits=LIMITS.audio)
    assert np.isfinite(samples).all()
    assert len(samples) <= 16_000 * LIMITS.audio.max_duration_s + 1


def tensors_come(content: bytes) -> None:
    fields: Any = {"pixel_values": None, "grid": None}
    found = read_precomputed(content, fields, limits=LIMITS)
    assert all(tensor.numel() * tensor.element_size() <= len(content) for tensor in found.tensors.values())


def data_comes(content: bytes) -> None:
    assert len(asyncio.run(DataUrl([content]).decode(LIMITS))) <= LIMITS.max_item_bytes


def only_refuses(call: Callable[[bytes], None], content: bytes) -> None:
    started = time.perf_counter()
    refusal = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(content)
    except InvalidRequestError as error:
        refusal = error
    assert time.perf_counter() - started < SECONDS
    assert refusal is None or refusal.field == "media"


KINDS_OF_MEDIA = {
    "pictures": (picture_comes, pictures),
    "videos": (video_comes, videos),
    "sounds": (sound_comes, sounds),
    "tensors": (tensors_come, tensor_files),
    "data URLs": (data_comes, data_urls),
}
OVERS = pytest.mark.parametrize("kind", KINDS_OF_MEDIA)


def attack(kind: str, budget: settings) -> None:
    call, originals = KINDS_OF_MEDIA[kind]
    for content in originals():
        call(content)

    @budget
    @given(damaged(originals))
    def run(content: bytes) -> None:
        only_refuses(call, content)

    run()


@pytest.mark.long
@OVERS
def test_damaged_media_are_decoded_or_refused(kind: str, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    with caplog.at_level(logging.WARNING):
        attack(kind, QUICK)
    assert [record for record in caplog.records if record.name != "libav"] == []
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@OVERS
def test_more_damaged_media_are_decoded_or_refused(kind: str) -> None:
    attack(kind, LONG)
