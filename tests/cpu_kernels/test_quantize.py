"""Weights are rounded to the nearest number of their group's scale, in 4 bits with the scale of the least error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.packed_weight import WeightLayout
from raylens.cpu_kernels.quantize import quantize
from tests.cpu_kernels.test_product import EVERY_LIBRARY

SIZES = st.tuples(st.integers(1, 20), st.integers(1, 70), st.sampled_from([4, 32, 64, 128]))


def by_groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    """(rows, groups, size), with zeros behind a row's end."""
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).view(len(weight), -1, size)


@EVERY_LIBRARY
@given(sizes=SIZES, seed=st.integers(0, 2**32))
def test_8_bits_are_the_nearest_of_a_scale_that_reaches_the_largest(
    library: KernelLibrary, sizes: tuple[int, int, int], seed: int
) -> None:
    rows, units, group = sizes
    weight = torch.randn(rows, 4 * units, generator=torch.Generator().manual_seed(seed))
    found = quantize(library, weight, WeightLayout(len(weight), weight.shape[1], "int8", group))
    groups = by_groups(weight, group)
    torch.testing.assert_close(found.scales, groups.abs().amax(2) / 127)
    errors = (groups - by_groups(found.numbers.float(), group) * found.scales[..., None]).abs()
    assert (errors <= 0.5001 * found.scales[..., None]).all()


@EVERY_LIBRARY
@given(sizes=SIZES, seed=st.integers(0, 2**32))
def test_4_bits_have_no_larger_error_than_without_clipping(
    library: KernelLibrary, sizes: tuple[int, int, int], seed: int
) -> None:
    rows, units, group = sizes
    weight = torch.randn(rows, 4 * units, generator=torch.Generator().manual_seed(seed))
    found = quantize(library, weight, WeightLayout(len(weight), weight.shape[1], "int4", group))
    assert found.numbers.min() >= -8
    assert found.numbers.max() <= 7
    groups = by_groups(weight, group)
    whole = groups.abs().amax(2, keepdim=True) / 7
    unclipped = (groups - (groups / whole).round() * whole).square().sum(2)
    errors = (groups - by_groups(found.numbers.float(), group) * found.scales[..., None]).square().sum(2)
    assert (errors <= unclipped * 1.0001).all()


def test_clipping_makes_4_bits_more_exact(library: KernelLibrary) -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    found = quantize(library, weight, WeightLayout(64, 1024, "int4", 64))
    groups = by_groups(weight, 64)
    whole = groups.abs().amax(2, keepdim=True) / 7
    unclipped = (groups - (groups / whole).round() * whole).square().sum()
    errors = (groups - by_groups(found.numbers.float(), 64) * found.scales[..., None]).square().sum()
    assert errors < 0.9 * unclipped


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_group_of_zeros_stays_zero(library: KernelLibrary, form: str) -> None:
    layout = WeightLayout(1, 8, form, 4)  # type: ignore[arg-type]
    found = quantize(library, torch.tensor([[0.0, 0, 0, 0, 1, 2, 3, 4]]), layout)
    assert not found.numbers[0, :4].any()
    assert found.scales.isfinite().all()
