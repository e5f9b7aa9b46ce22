"""Weights of fewer bits: each number is exact, and a product is bit-identical to that of the numbers in float32.

With AMX, which has another order of sums than float32's products, it differs by rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.packed_weight import Form, QuantizedRows, WeightLayout
from tests.cpu_kernels.packing import is_product, pack, pack_quantized
from tests.cpu_kernels.test_product import EVERY_LIBRARY

NUM_ROWS = st.sampled_from([0, 1, 2, 3, 5, 6, 7, 8, 9, 17, 257])
RANGES: dict[Form, tuple[int, int]] = {"int8": (-128, 128), "int4": (-8, 8)}


def all_rows(weight: WeightLayout) -> torch.Tensor:
    return torch.arange(weight.out_features)


def quantized(form: Form, columns: int, num_k: int, group_size: int, *, has_zeros: bool, seed: int) -> QuantizedRows:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-num_k // group_size)
    if form == "float8":
        exact = torch.randn(columns, num_k, generator=generator).to(torch.float8_e4m3fn)
        numbers = exact.view(torch.uint8)
    else:
        numbers = torch.randint(*RANGES[form], (columns, num_k), generator=generator, dtype=torch.int8)
    scales = torch.rand(columns, groups, generator=generator) + 0.1
    zeros = torch.randint(-8, 8, (columns, groups), generator=generator).float() if has_zeros else None
    return QuantizedRows(numbers, scales, zeros)


def dequantized(rows: QuantizedRows, form: Form, group_size: int) -> torch.Tensor:
    numbers = rows.numbers.view(torch.float8_e4m3fn).float() if form == "float8" else rows.numbers.float()
    scales, zeros = (
        None if one is None else one.repeat_interleave(group_size, dim=1)[:, : numbers.shape[1]]
        for one in (rows.scales, rows.zeros)
    )
    assert scales is not None
    return (numbers if zeros is None else numbers - zeros) * scales


@EVERY_LIBRARY
@given(
    form=st.sampled_from(["int8", "int4", "float8"]),
    has_zeros=st.booleans(),
    columns=st.integers(1, 80),
    num_units=st.integers(1, 40) | st.sampled_from([511, 512, 513, 1025]),
    group_size=st.sampled_from([4, 32, 64, 128, 8192]),
    num_rows=NUM_ROWS,
    seed=st.integers(0, 2**32),
)
def test_a_quantized_weight_gives_what_its_numbers_in_float32_give(
    library: KernelLibrary,
    form: Form,
    has_zeros: bool,
    columns: int,
    num_units: int,
    group_size: int,
    num_rows: int,
    seed: int,
) -> None:
    num_k, has_zeros = 4 * num_units, has_zeros and form != "float8"
    rows = quantized(form, columns, num_k, group_size, has_zeros=has_zeros, seed=seed)
    layout = WeightLayout(columns, num_k, form, group_size, has_zeros)
    packed = pack_quantized(library, rows, layout)
    numbers = packed.rows(all_rows(layout))
    assert torch.equal(numbers, dequantized(rows, form, group_size))
    assert torch.equal(packed.rows(all_rows(layout), 0.3), numbers * 0.3)
    floats = pack(library, numbers, WeightLayout(columns, num_k, "float32"))
    x = torch.randn(num_rows, num_k, generator=torch.Generator().manual_seed(seed))
    product = packed.product(x, None)
    is_equal = torch.equal(product, floats.product(x, None))
    assert is_equal or (library.build == "amx" and is_product(product, x, numbers, None))
    for row in range(0, num_rows, 1 + num_rows // 8):
        assert torch.equal(packed.product(x[row], None), product[row])


FORMS = pytest.mark.parametrize(
    ("form", "has_zeros"), [("int8", False), ("int8", True), ("int4", False), ("int4", True), ("float8", False)]
)


@pytest.mark.parametrize("parts", [1, 2])
@FORMS
def test_a_rounded_row_is_the_same_among_others(
    library: KernelLibrary, form: Form, has_zeros: bool, parts: int
) -> None:
    layout = WeightLayout(75, 192, form, 64, has_zeros)
    packed = pack_quantized(library, quantized(form, 75, 192, 64, has_zeros=has_zeros, seed=0), layout, parts)
    x = torch.randn(64, 192, generator=torch.Generator().manual_seed(0))
    product = packed.product(x, None)
    assert all(torch.equal(packed.product(row, None), product[index]) for index, row in enumerate(x))


@pytest.mark.parametrize(("num_k", "group_size"), [(192, 64), (1864, 32), (1864, 8192)])
@FORMS
def test_many_rounded_rows_round_the_numbers_times_their_scales(
    library: KernelLibrary, form: Form, has_zeros: bool, num_k: int, group_size: int
) -> None:
    rows = quantized(form, 75, num_k, group_size, has_zeros=has_zeros, seed=0)
    packed = pack_quantized(library, rows, WeightLayout(75, num_k, form, group_size, has_zeros), 1)
    numbers = packed.rows(torch.arange(75))
    x = torch.randn(100, num_k, generator=torch.Generator().manual_seed(0))
    seen = numbers.bfloat16() if library.build == "amx" else numbers
    assert torch.equal(packed.product(x, None), pack(library, seen, row_parts=1).product(x, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_exact(library: KernelLibrary, dtype: torch.dtype) -> None:
    bits = torch.arange(2**16).to(torch.int32).to(torch.uint16).view(dtype)
    finite = torch.where(bits.isfinite(), bits, torch.zeros(())).view(256, 256).to(dtype)
    packed = pack(library, finite)
    assert packed.layout.form == str(dtype).removeprefix("torch.")
    assert torch.equal(packed.rows(torch.arange(256)), finite.float())


def test_every_number_of_float8_is_exact(library: KernelLibrary) -> None:
    numbers = torch.arange(256).to(torch.uint8)
    numbers[[0x7F, 0xFF]] = 0  # NaN
    layout = WeightLayout(4, 64, "float8", 64)
    packed = pack_quantized(library, QuantizedRows(numbers.view(4, 64), torch.ones(4, 1)), layout)
    assert torch.equal(packed.rows(all_rows(layout)), numbers.view(torch.float8_e4m3fn).float().view(4, 64))


@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_a_weight_of_16_bits_gives_what_it_gives_in_float32(library: KernelLibrary, num_rows: int) -> None:
    x = torch.randn(num_rows, 132)
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.randn(75, 132).to(dtype)
        product = pack(library, weight).product(x, None)
        if library.build != "amx" or dtype == torch.float16:
            assert torch.equal(
                product, pack(library, weight.float(), WeightLayout(75, 132, "float32")).product(x, None)
            )
        assert is_product(product, x, weight.float(), None)


def test_a_weight_is_as_short_as_its_numbers_allow() -> None:
    weight = torch.ones(4, 4)
    assert WeightLayout.of(weight).form == "bfloat16"
    assert WeightLayout.of(torch.ones(4, 5)).form == WeightLayout.of(torch.ones(4, 5).bfloat16()).form == "float32"
    weight[2, 3] = 1 + 2**-9
    assert WeightLayout.of(weight).form == "float32"
    assert WeightLayout.of(weight.half()).form == "float16"


def test_an_index_without_a_row_is_refused(library: KernelLibrary) -> None:
    packed = pack(library, torch.ones(5, 4))
    with pytest.raises(IndexError, match="rows 0 to 4 are there"):
        packed.rows(torch.tensor([0, 5]))
