"""Large items are divided into as few segments as fit, and nothing of them is lost."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.encoder.models.family import VisionModality
from raylens.encoder.segments import divide
from raylens.modeling.families import load_family
from raylens.preprocess.schema import ItemTensors

CONFIG = cast(Any, SimpleNamespace(vision_config=SimpleNamespace(patch_size=14)))
TILES: VisionModality = load_family("encoder", "minicpmv4_6").modalities["image"]
"""Its tiles have different numbers of patches."""


def item(widths: list[int]) -> ItemTensors:
    """Returns tiles that are one patch high, and so many wide. A patch is one pixel, whose value is its place."""
    sizes = torch.tensor([[1, width] for width in widths])
    return {"pixel_values": torch.arange(sum(widths)).view(1, 1, 1, -1), "target_sizes": sizes}


@settings(max_examples=100, deadline=None)
@given(widths=st.lists(st.integers(1, 9), min_size=1, max_size=12), most=st.integers(1, 20))
def test_segments_are_as_long_as_fits(widths: list[int], most: int) -> None:
    segments = divide(TILES, CONFIG, item(widths), most)
    for name, axis in (("pixel_values", -1), ("target_sizes", 0)):
        joined = torch.cat([segment.tensors[name] for segment in segments], dim=axis)
        assert torch.equal(joined, item(widths)[name])
    costs = [segment.num_patches for segment in segments]
    assert costs == [segment.tensors["pixel_values"].shape[-1] for segment in segments]
    assert all(
        cost <= most or len(segment.tensors["target_sizes"]) == 1 for cost, segment in zip(costs, segments, strict=True)
    )
    firsts = [int(segment.tensors["target_sizes"][0, 1]) for segment in segments]
    assert all(cost + first > most for cost, first in zip(costs, firsts[1:], strict=False)), "one more tile would fit"


def test_what_a_family_does_not_divide_is_one_segment() -> None:
    picture = {"pixel_values": torch.zeros(3, 56, 56)}
    for model_type in ("llava", "mistral3"):
        modality = load_family("encoder", model_type).modalities["image"]
        (segment,) = divide(modality, CONFIG, picture, 1)
        assert segment.tensors is picture
        assert segment.num_patches == 16
