"""Packed convolutions compute what they stand for."""

from typing import Any

import pytest
import torch
from torch import nn

from raylens.modeling.packed_linear import packable_dtypes
from raylens.modeling.packed_patches import PackedPatches, pack_patch_convolutions


@pytest.mark.parametrize("dtype", packable_dtypes())
@pytest.mark.parametrize(
    ("kind", "kernel", "sizes"),
    [
        (nn.Conv2d, (4, 4), (12, 8)),
        (nn.Conv2d, (2, 3), (7, 11)),  # something is left of either side
        (nn.Conv3d, (2, 3, 3), (4, 6, 9)),
        (nn.Conv3d, (2, 5, 5), (2, 5, 5)),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_convolution_computes_the_same(
    dtype: torch.dtype, kind: Any, kernel: tuple[int, ...], sizes: tuple[int, ...], bias: bool
) -> None:
    torch.manual_seed(0)
    convolution = kind(3, 16, kernel_size=kernel, stride=kernel, bias=bias, dtype=dtype)
    pixels = torch.randn(5, 3, *sizes, dtype=dtype)
    packed = PackedPatches(convolution)
    with torch.inference_mode():
        output, expected = packed(pixels), convolution(pixels)
    assert (output.dtype, packed.weight.dtype) == (dtype, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


def test_only_what_cuts_patches_is_packed() -> None:
    kept = [
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(3, 4, 2, stride=2, padding=1),
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(3, 4, 2, stride=2, dtype=torch.float64),
        nn.Conv2d(3, 4, 2, stride=2, device="meta"),
    ]
    model = nn.ModuleList([*kept, nn.Conv2d(3, 4, 2, stride=2, padding="valid"), nn.Conv2d(3, 4, 2, stride=2)])
    pack_patch_convolutions(model, lambda name: name != "7")
    assert [type(module) for module in model] == [nn.Conv2d] * len(kept) + [PackedPatches, nn.Conv2d]
