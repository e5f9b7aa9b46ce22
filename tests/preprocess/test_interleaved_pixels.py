"""Pictures whose pixels stay interleaved come out as from transformers' own processor, to the last bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor, CLIPImageProcessor, Qwen2VLImageProcessor, SiglipImageProcessor
from transformers.image_utils import PILImageResampling

from raylens.preprocess.interleaved_pixels import keep_pixels_interleaved

PROCESSORS: dict[str, Any] = {
    "clip": lambda: CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}),
    "bilinear": lambda: SiglipImageProcessor(
        size={"height": 48, "width": 64}, resample=PILImageResampling.BILINEAR, do_center_crop=False
    ),
    "lanczos": lambda: SiglipImageProcessor(size={"height": 48, "width": 64}, resample=PILImageResampling.LANCZOS),
    "nearest": lambda: SiglipImageProcessor(size={"height": 48, "width": 64}, resample=PILImageResampling.NEAREST),
    "qwen2_vl": lambda: Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112),
    "not resized": lambda: SiglipImageProcessor(do_resize=False),
}


def noise(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("name", PROCESSORS)
@given(width=st.integers(8, 200), height=st.integers(8, 200), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_the_same_to_the_last_bit(name: str, width: int, height: int, seed: int) -> None:
    theirs, ours = PROCESSORS[name](), PROCESSORS[name]()
    keep_pixels_interleaved(ours)
    picture = noise(width, height, seed)
    expected, found = (one(picture, return_tensors="pt") for one in (theirs, ours))
    assert expected.keys() == found.keys()
    for key in expected:
        assert torch.equal(expected[key], found[key])


def test_the_pixels_are_copied_once_and_the_name_stays(tmp_path: Path) -> None:
    processor = PROCESSORS["clip"]()
    before = processor.to_dict()
    keep_pixels_interleaved(processor)
    assert processor.process_image(noise(30, 20, 0)).stride() == (1, 90, 3)
    assert processor.to_dict() == before
    processor.save_pretrained(tmp_path)
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is CLIPImageProcessor


def test_what_is_no_picture_goes_the_usual_way() -> None:
    theirs, ours = PROCESSORS["clip"](), PROCESSORS["clip"]()
    keep_pixels_interleaved(ours)
    for image in (torch.randint(256, (3, 20, 30), dtype=torch.uint8), Image.new("L", (30, 20), 7)):
        expected, found = (one.process_image(image, do_convert_rgb=True) for one in (theirs, ours))
        assert torch.equal(expected, found)
        assert found.is_contiguous()


def test_other_processors_stay_as_they_are() -> None:
    for other in (None, object()):
        keep_pixels_interleaved(other)
