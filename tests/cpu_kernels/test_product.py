"""Products with packed weights: near the definition, and a row is the same to the last bit among any others."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.packed_weight import PAIR
from tests.cpu_kernels.packing import is_product, pack

EVERY_LIBRARY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def shifted(rows: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that begins `offset` numbers behind the start of a cache line."""
    room = torch.empty(rows.numel() + offset + 16)
    offset += -room.data_ptr() // 4 % 16
    copy = room[offset : offset + rows.numel()].view(rows.shape)
    return copy.copy_(rows)


sizes = st.tuples(
    st.integers(0, 40) | st.sampled_from([255, 256, 257, 600]),
    st.integers(1, 80),
    st.integers(1, 100) | st.integers(1020, 1030) | st.sampled_from([1536, 1540, 3104]),
)


@EVERY_LIBRARY
@given(
    sizes=sizes, seed=st.integers(0, 2**32), has_bias=st.booleans(), is_short=st.booleans(), offset=st.integers(0, 15)
)
def test_products_of_any_size(
    library: KernelLibrary, sizes: tuple[int, int, int], seed: int, has_bias: bool, is_short: bool, offset: int
) -> None:
    num_rows, columns, num_k = sizes
    generator = torch.Generator().manual_seed(seed)
    weight, rows = (torch.randn(count, num_k, generator=generator) for count in (columns, num_rows))
    bias = torch.randn(columns, generator=generator) if has_bias else None
    if is_short:
        weight = weight.bfloat16().float()
    packed, rows = pack(library, weight), shifted(rows, offset)
    product = packed.product(rows, bias)
    assert is_product(product, rows, weight, bias)
    assert packed.layout.form == ("bfloat16" if is_short and num_k % PAIR == 0 else "float32")
    for row in range(0, num_rows, 1 + num_rows // 40):
        assert torch.equal(packed.product(rows[row], bias), product[row])


@EVERY_LIBRARY
@given(num_rows=sizes.map(lambda sizes: sizes[0]), parts=st.sampled_from([1, 2]), seed=st.integers(0, 2**32))
def test_rows_may_be_rounded(library: KernelLibrary, num_rows: int, parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, rows = (torch.randn(count, 136, generator=generator) for count in (70, num_rows))
    weight = weight.bfloat16().float()
    product = pack(library, weight, row_parts=parts).product(rows, None)
    upper = (rows.view(torch.int32) & -65536).view(torch.float32)
    rounded = rows.bfloat16().float() if parts == 1 else upper + (rows - upper).bfloat16().float()
    assert is_product(product, rounded if library.build == "amx" else rows, weight, None)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(library: KernelLibrary, num_threads: int) -> None:
    weight, rows = torch.randn(700, 90), torch.randn(300, 90)
    packed, before = pack(library, weight), torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        products = [packed.product(rows, None) for _ in range(50)]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(products[0], rows @ weight.T, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(product, products[0]) for product in products)


def test_several_threads_may_call_at_once(library: KernelLibrary) -> None:
    from concurrent.futures import ThreadPoolExecutor

    packed = pack(library, torch.randn(200, 90))
    batches = [torch.randn(20, 90) for _ in range(8)]
    expected = [packed.product(rows, None) for rows in batches]
    with ThreadPoolExecutor(4) as executor:
        for _ in range(20):
            products = executor.map(lambda rows: packed.product(rows, None), batches)
            assert all(map(torch.equal, products, expected))


@pytest.mark.parametrize("rows", [torch.ones(2, 3), torch.ones(2, 4, dtype=torch.float64)])
def test_rows_of_another_width_or_dtype_are_refused(library: KernelLibrary, rows: torch.Tensor) -> None:
    weight = pack(library, torch.ones(5, 4))
    with pytest.raises(ValueError, match=r"rows of 4 numbers in float32 are wanted, not \[2, \d\] in"):
        weight.product(rows, None)
