"""Attention on a GPU is that of the definition. Without one its kernels run in Triton's interpreter, on the CPU."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.llm.sequence import Sequence
from tests.llm.attention_reference import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Shape,
    Told,
    attend,
    check_in_steps,
    reference,
    sequences,
)

pytest.importorskip("triton")

from triton.runtime import interpreter

from raylens.llm.cache_size import check_cache_dtype
from raylens.llm.cuda import attention as cuda_attention
from raylens.llm.cuda.attention import CudaAttention
from raylens.llm.cuda.decode_kernels import PagedContexts, _aligned, count_splits, paged_decode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = Shape()
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as the bits that it consists of, and would multiply these as integers."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def as_float(handle: Any) -> Any:
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)

    def patched(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, as_float(a), as_float(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", patched)


def make_attention(shape: Shape, window: int | None = None, dtype: torch.dtype = torch.float32) -> CudaAttention:
    return CudaAttention(
        [shape.layer(window)],
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        windows_cut_spans=True,
        max_positions=BLOCK_SIZE * NUM_BLOCKS,
        device=DEVICE,
    )


@settings(max_examples=15, deadline=None)
@given(
    sequences(SHAPE),
    st.lists(st.integers(0, 40) | st.just(37), min_size=4, max_size=4),
    st.none() | st.integers(1, 12),
    st.none() | st.just(0.5),
)
def test_any_step_attends_as_defined(
    told: list[Told], cuts: list[int], window: int | None, softcap: float | None
) -> None:
    check_in_steps(make_attention(SHAPE, window), told, cuts, window, softcap, DEVICE)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("cut", [0, 1, 16, 29, 32])
def test_a_sequence_without_spans_attends_as_defined(cut: int, softcap: float | None, window: int | None) -> None:
    """In a chunk behind others, and, where 32 of its 33 positions are in the cache, in decoding."""
    sequence = Sequence("a", [0] * 33, 33, [], 100, block_table=list(range(9)))
    told = Told.random(sequence, SHAPE, torch.Generator().manual_seed(0))
    check_in_steps(make_attention(SHAPE, window), [told], [cut], window, softcap, DEVICE)


def decode(
    shape: Shape,
    lengths: list[int],
    *,
    num_splits: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    block_size: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode of sequences of `lengths`, and what the definition says of the numbers as they are stored."""
    generator = torch.Generator().manual_seed(sum(lengths) + num_splits)
    widths = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(widths), generator=generator, dtype=torch.int32)
    # NaN where nobody may look: in blocks of nobody, and in the rest of a sequence's last block.
    keys, values = (
        torch.full((sum(widths) + 1, block_size, shape.kv_heads, dim), torch.nan).to(cache_dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    tables = torch.full((len(lengths), max(widths) + 1), sum(widths), dtype=torch.int32)
    expected, queries = [], []
    for row, (length, blocks) in enumerate(zip(lengths, torch.split(order, widths), strict=True)):
        tables[row, : len(blocks)] = blocks
        sequence = Sequence("a", [0] * length, length, [], length)
        told = Told.random(sequence, shape, generator)
        query, own_keys, own_values = told.queries.to(dtype), told.keys.to(cache_dtype), told.values.to(cache_dtype)
        slots = blocks.long()[torch.arange(length) // block_size] * block_size + torch.arange(length) % block_size
        keys.view(-1, *keys.shape[2:]).view(torch.uint8)[slots] = own_keys.view(torch.uint8)
        values.view(-1, *values.shape[2:]).view(torch.uint8)[slots] = own_values.view(torch.uint8)
        stored = Told(sequence, query.float(), own_keys.float(), own_values.float())
        expected.append(reference(stored, length - 1, length, window, softcap)[0])
        queries.append(query[-1])
    output = torch.full((len(lengths), shape.heads, shape.value_dim), torch.nan, dtype=dtype, device=DEVICE)
    paged_decode(
        torch.stack(queries).to(DEVICE),
        keys.to(DEVICE),
        values.to(DEVICE),
        PagedContexts(tables.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)),
        output,
        scaling=shape.key_dim**-0.5,
        softcap=softcap,
        window=window,
        num_splits=num_splits,
    )
    return output.cpu().float(), torch.stack(expected)


close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 5, 9]),
    st.none() | st.integers(1, 250),
    st.none() | st.just(0.5),
    st.sampled_from([(1, 3), (2, 1), (3, 2), (8, 1)]),
    st.sampled_from([1, 4, 16]),
)
def test_splits_merge_to_the_whole(
    lengths: list[int],
    num_splits: int,
    window: int | None,
    softcap: float | None,
    heads: tuple[int, int],
    block_size: int,
) -> None:
    groups, kv_heads = heads
    shape = Shape(heads=groups * kv_heads, kv_heads=kv_heads)
    close(*decode(shape, lengths, num_splits=num_splits, window=window, softcap=softcap, block_size=block_size))


@pytest.mark.parametrize("groups", range(1, 9))
def test_any_number_of_heads_shares_a_key_head(groups: int) -> None:
    close(*decode(Shape(heads=2 * groups, kv_heads=2), [1, 70], num_splits=2))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (16, 16), (20, 12), (12, 40), (80, 80), (192, 128)])
def test_heads_of_any_size(key_dim: int, value_dim: int) -> None:
    close(*decode(Shape(key_dim=key_dim, value_dim=value_dim), [3, 66], num_splits=2))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "error"),
    [
        (torch.float32, torch.bfloat16, 1e-4),
        (torch.float32, torch.float8_e4m3fn, 1e-4),
        (torch.float16, torch.float16, 4e-3),
        (torch.bfloat16, torch.bfloat16, 3e-2),
        (torch.bfloat16, torch.float16, 3e-2),
        (torch.bfloat16, torch.float8_e4m3fn, 3e-2),
    ],
)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_queries_and_cache_of_any_dtype(
    dtype: torch.dtype, cache_dtype: torch.dtype, error: float, num_splits: int
) -> None:
    output, expected = decode(
        Shape(key_dim=16, value_dim=16), [1, 40, 150], num_splits=num_splits, dtype=dtype, cache_dtype=cache_dtype
    )
    assert (output - expected).abs().max() < error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_cache_of_another_dtype_is_near(dtype: torch.dtype) -> None:
    sequence = Sequence("a", [0] * 30, 30, [], 100, block_table=list(range(8)))
    told = Told.random(sequence, SHAPE, torch.Generator().manual_seed(0))
    attention = make_attention(SHAPE, dtype=dtype)
    outputs = [attend(attention, [told], [size], None, None, DEVICE)[0] for size in (29, 1)]
    expected = reference(told, 0, 30, None, None)
    assert (torch.cat(outputs) - expected).abs().max() < 0.2
    assert not torch.equal(torch.cat(outputs), expected)


def test_queries_begin_at_an_aligned_address() -> None:
    """Others would have kernels of their own."""
    numbers = torch.arange(9.0, device=DEVICE)
    assert _aligned(numbers).data_ptr() == numbers.data_ptr()
    within = _aligned(numbers[1:])
    assert within.data_ptr() % 16 == 0
    assert torch.equal(within, numbers[1:])


def test_a_gpu_whose_kernels_lack_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    check_cache_dtype(torch.bfloat16, device)
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: .*8\.9 or higher.*has 8\.6"):
        check_cache_dtype(torch.float8_e4m3fn, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_cache_dtype(torch.float8_e4m3fn, device)


def test_one_long_context_keeps_all_processors_busy_and_many_are_not_split() -> None:
    assert count_splits(32, 4096, 132) == 16
    assert count_splits(8, 2**17, 132) == 64
    assert count_splits(64 * 32, 4096, 132) == 1
    assert count_splits(1, 100, 132) == 1


def test_long_contexts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def count(*args: int) -> int:
        asked.append(args[:2])
        return 3

    monkeypatch.setattr(cuda_attention, "count_splits", count)
    sequence = Sequence("a", [0] * 140, 140, [], 200, block_table=list(range(39, 4, -1)))
    told = Told.random(sequence, SHAPE, torch.Generator().manual_seed(0))
    check_in_steps(make_attention(SHAPE), [told], [139], None, None, DEVICE)
    assert asked == [(SHAPE.kv_heads, 140)]


@pytest.mark.parametrize(
    "gpus", [{"A100": "80", "H100": "90"}, pytest.param({"L4": "89", "B200": "100"}, marks=pytest.mark.slow)]
)
def test_kernels_compile_for_a_gpu(tmp_path: Path, gpus: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.llm.compile_kernels", *gpus.values()]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
