"""Prefill chunks go in one call where PyTorch has a kernel for it, and attend as each would alone. The kernel runs on
GPUs only, so a stand-in with its contract takes its place here."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raylens.llm.prompt_layout import BidirectionalSpan, PromptLayout
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence
from raylens.modeling import varlen_attention
from raylens.modeling.varlen_attention import attend_causally
from tests.llm.attention_reference import BLOCK_SIZE, Shape, Told, attend, check_in_steps, make_builder, sequences

pytest.importorskip("triton")

from raylens.llm import prefill_chunks
from raylens.llm.cuda.attention import CudaAttention
from tests.llm.test_cuda_attention import DEVICE, make_attention

SHAPE = Shape(heads=4, kv_heads=2, key_dim=6, value_dim=6)


def causally(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = True,
) -> torch.Tensor:
    """What `varlen_attn` computes: the queries of a sequence see its keys up to their own positions, and they are the
    last ones. Key heads are shared."""
    assert window_size == (-1, 0)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q.is_contiguous()
    assert cu_seq_k.is_contiguous()
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert [len(query), len(key), len(value)] == [int(starts[-1]) for starts in (cu_seq_q, cu_seq_k, cu_seq_k)]
    output, groups = torch.empty_like(query), query.shape[1] // key.shape[1]
    for index in range(len(cu_seq_q) - 1):
        rows, seen = (slice(int(starts[index]), int(starts[index + 1])) for starts in (cu_seq_q, cu_seq_k))
        keys, values = (part[seen].float().repeat_interleave(groups, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * scale
        is_seen = torch.ones_like(scores[0], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output


@dataclass
class Kernel:
    """Takes the place of PyTorch's function, and notes how many sequences each call has."""

    calls: list[int] = field(default_factory=list)

    def __call__(self, *args: Any, **others: Any) -> torch.Tensor:
        self.calls.append(len(args[3]) - 1)
        return causally(*args, **others)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(varlen_attention, "varlen_attn", kernel)
    monkeypatch.setattr(prefill_chunks, "has_kernel", lambda queries: True)
    return kernel


def told_of(length: int, shape: Shape = SHAPE, layout: PromptLayout | None = None, first_block: int = 0) -> Told:
    num_blocks = -(-length // BLOCK_SIZE)
    table = list(range(first_block + num_blocks - 1, first_block - 1, -1))
    sequence = Sequence("a", [0] * length, length, [], 100, block_table=table, layout=layout or PromptLayout())
    return Told.random(sequence, shape, torch.Generator().manual_seed(length))


# Hypothesis runs all examples with the same stand-in, which keeps nothing that a result depends on.
@pytest.mark.long
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequences(SHAPE), st.lists(st.integers(0, 40), min_size=4, max_size=4), st.sampled_from([1, 40, 1000]))
def test_any_step_attends_as_defined(kernel: Kernel, told: list[Told], cuts: list[int], max_positions: int) -> None:
    attention = make_attention(SHAPE)
    attention._max_positions = max_positions
    check_in_steps(attention, told, cuts, None, None, DEVICE)


def test_chunks_of_a_step_go_in_one_call(kernel: Kernel) -> None:
    told = [told_of(length, first_block=10 * index) for index, length in enumerate((9, 30, 17, 8))]
    check_in_steps(make_attention(SHAPE), told, [5, 12, 0, 1], None, None, DEVICE)
    # First chunks of two, where the single token of the fourth decodes. Then all but the last tokens, which decode.
    assert kernel.calls == [2, 4]


@pytest.mark.parametrize(("max_positions", "calls"), [(59, [4]), (58, [3, 1]), (30, [1, 1, 2]), (1, [1, 1, 1, 1])])
def test_copies_of_keys_and_values_are_bounded(kernel: Kernel, max_positions: int, calls: list[int]) -> None:
    told = [told_of(length, first_block=10 * index) for index, length in enumerate((9, 30, 17, 3))]
    attention = make_attention(SHAPE)
    attention._max_positions = max_positions
    attend(attention, told, [9, 30, 17, 3], None, None, DEVICE)
    assert kernel.calls == calls


@pytest.mark.parametrize(
    ("window", "softcap", "shape"),
    [(4, None, SHAPE), (None, 0.5, SHAPE), (None, None, Shape(heads=4, kv_heads=2, key_dim=6, value_dim=5))],
)
def test_what_the_kernel_does_not_compute_goes_chunk_by_chunk(
    kernel: Kernel, window: int | None, softcap: float | None, shape: Shape
) -> None:
    check_in_steps(make_attention(shape, window), [told_of(20, shape)], [11], window, softcap, DEVICE)
    assert kernel.calls == []


def test_a_window_that_cuts_nothing_goes_in_one_call(kernel: Kernel) -> None:
    check_in_steps(make_attention(SHAPE, 20), [told_of(20)], [11], 20, None, DEVICE)
    assert kernel.calls == [1, 1]


def test_spans_go_chunk_by_chunk(kernel: Kernel) -> None:
    layout = PromptLayout(spans=(BidirectionalSpan.of(range(12, 20)),))
    check_in_steps(make_attention(SHAPE), [told_of(20, layout=layout)], [11], None, None, DEVICE)
    assert kernel.calls == [1], "the span's chunk is the second one"


def test_a_prompt_chunk_of_one_token_behind_a_longer_one_is_among_the_chunks(kernel: Kernel) -> None:
    """It counts as prefill there, see `StepInput.num_decodes`."""
    long, short = told_of(9), told_of(5, first_block=10)
    short.sequence.num_computed_tokens = 4
    attention: CudaAttention = make_attention(SHAPE)
    chunks = [ScheduledChunk(long.sequence, 9), ScheduledChunk(short.sequence, 1)]
    prepared = attention.prepare(make_builder().build(chunks))
    (together,) = prepared.prefills
    assert together.query_lengths == [9, 1]
    assert together.context_lengths == [9, 5]
    assert together.starts.tolist() == [[0, 9, 10], [0, 9, 14]]


def test_pytorch_s_function_takes_what_it_is_called_with() -> None:
    """Its shapes are computed without a GPU."""
    queries, keys, values = (torch.empty(10, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2, 2))
    starts = torch.empty(2, 3, dtype=torch.int32, device="meta")
    output = attend_causally(queries, keys, values, starts=starts, longest=(6, 6), scaling=0.1)
    assert output.shape == queries.shape
    assert output.dtype == queries.dtype


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_the_kernel_has_the_contract_of_the_stand_in(dtype: torch.dtype, kv_heads: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    num_queries, num_keys = [5, 1, 130, 64], [5, 200, 300, 64]
    queries, keys, values = (
        torch.randn(size, heads, 64, generator=generator, device="cuda").to(dtype)
        for size, heads in ((200, 8), (569, kv_heads), (569, kv_heads))
    )
    starts = torch.tensor([[0, *num_queries], [0, *num_keys]], device="cuda").cumsum(1).int()
    longest = max(num_queries), max(num_keys)
    found = attend_causally(queries, keys, values, starts=starts, longest=longest, scaling=0.125)
    expected = causally(
        queries, keys, values, starts[0], starts[1], longest[0], longest[1], scale=0.125, window_size=(-1, 0)
    )
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
