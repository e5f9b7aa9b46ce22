"""What is particular to LLaVA-OneVision: pictures alone and among others, and the largest with real settings."""

import random
from pathlib import Path

import pytest

from raylens.preprocess.hf_processor import load_processor
from raylens.preprocess.models.llava_next import LLAVA_ONEVISION
from tests.preprocess.merged_items import merged_items
from tests.preprocess.parity import Pair, pair
from tests.preprocess.small_processors import save_processor


@pytest.fixture
def onevision() -> Pair:
    return pair("llava_onevision", "byte_level", "pil")


def test_only_a_picture_alone_is_tiled(onevision: Pair) -> None:
    ((alone, alone_tensors),) = onevision.items([3])
    (among, among_tensors), _ = onevision.items([3, 0])
    assert alone_tensors["pixel_values"].shape == (17, 3, 42, 42)
    assert among_tensors["pixel_values"].shape == (1, 3, 42, 42)
    assert among.num_embeds == 10 < alone.num_embeds


def test_the_other_pictures_need_not_be_there(onevision: Pair) -> None:
    """One new picture beside cached ones goes to the encoder alone, which must not take it for a tiled one."""
    items = [tensors for _, tensors in onevision.items([3, 0])]
    merged = merged_items(onevision.ours.items, "image", items[:1], num_in_prompt=2)
    assert merged["batch_num_images"].tolist() == [2]
    assert merged["pixel_values"].shape == (1, 1, 3, 42, 42)


@pytest.mark.parametrize("num_tiles", [1, 4, 9, 20, 36])
def test_the_largest_with_real_settings(num_tiles: int, tmp_path: Path) -> None:
    """The released checkpoints': tiles of 384 pixels, grids up to 6 x 6; theirs is "anyres_max_9"."""
    processor = load_processor(LLAVA_ONEVISION, save_processor("llava_onevision", "byte_level", tmp_path))
    processor.vision_aspect_ratio, processor.num_image_tokens = f"anyres_max_{num_tiles}", 729
    images = processor.image_processor
    images.size = {"height": 384, "width": 384}
    images.image_grid_pinpoints = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    (largest,) = LLAVA_ONEVISION.modalities["image"].largest(processor, {})
    most = processor._get_number_of_features(*largest, 384, 384)
    sides = random.Random(num_tiles)
    for _ in range(3000):
        height, shape = sides.randint(20, 4000), 2 ** sides.uniform(-4, 4)
        size = (height, max(4, int(height * shape)))
        assert processor._get_number_of_features(*size, 384, 384) <= most, size
