"""Attention over a paged cache is that of the definition, wherever the blocks lie and however a step is cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.cpu_kernels.library import kernel_library
from raylens.llm.cpu import attention as cpu_attention
from raylens.llm.cpu.attention import CpuAttention
from raylens.llm.cpu.kernel_attention import KernelAttention
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence
from tests.llm.attention_reference import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Shape,
    Told,
    attend,
    check_in_steps,
    make_builder,
    reference,
    sequences,
)

SHAPE = Shape()


def make_kernel_attention(window: int | None) -> KernelAttention:
    library = kernel_library()
    assert library is not None
    return KernelAttention(
        library,
        [SHAPE.layer(window)],
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        windows_cut_spans=True,
    )


def make_attention(window: int | None = None, dtype: torch.dtype = torch.float32) -> CpuAttention:
    return CpuAttention(
        [SHAPE.layer(window)], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, windows_cut_spans=True
    )


@pytest.mark.long
@settings(deadline=None)  # a busy machine is no failure
@given(
    sequences(SHAPE),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.none() | st.integers(1, 12),
    st.none() | st.just(0.5),
    st.sampled_from([0, 1, 8]),
)
def test_any_step_attends_as_defined(
    told: list[Told], cuts: list[int], window: int | None, softcap: float | None, max_stretches: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "MAX_STRETCHES", max_stretches)
        check_in_steps(make_attention(window), told, cuts, window, softcap)


@pytest.mark.long
@settings(deadline=None)
@given(
    sequences(SHAPE),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.none() | st.integers(1, 12),
    st.none() | st.just(0.5),
)
def test_any_step_attends_as_defined_with_kernels(
    told: list[Told], cuts: list[int], window: int | None, softcap: float | None
) -> None:
    check_in_steps(make_kernel_attention(window), told, cuts, window, softcap)


def test_what_a_sequence_of_adjacent_blocks_has_is_read_in_place() -> None:
    """However long it is: no copy of the cache is made for it."""
    sequence = Sequence("a", [0] * 101, 100, [], 200, block_table=list(range(3, 29)), num_computed_tokens=100)
    step = make_builder().build([ScheduledChunk(sequence, 1)])
    assert make_attention().prepare(step).decodes == {None: [[slice(12, 113)]]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_cache_of_another_dtype_is_near(dtype: torch.dtype) -> None:
    sequence = Sequence("a", [0] * 30, 30, [], 100, block_table=list(range(8)))
    told = Told.random(sequence, SHAPE, torch.Generator().manual_seed(0))
    attention = make_attention(dtype=dtype)
    outputs = [attend(attention, [told], [size], None, None)[0] for size in (29, 1)]
    expected = reference(told, 0, 30, None, None)
    assert (torch.cat(outputs) - expected).abs().max() < 0.2
    assert not torch.equal(torch.cat(outputs), expected)
