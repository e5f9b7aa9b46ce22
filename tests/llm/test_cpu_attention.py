"""Attention over a paged cache is that of the definition, wherever the blocks lie and however a step is cut."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm import cpu_attention
from llm.attention import AttentionCall, LayerShape
from llm.cpu_attention import CpuAttention
from llm.prompt_layout import BidirectionalSpan, PromptLayout
from llm.scheduler import ScheduledChunk
from llm.sequence import Sequence
from llm.step_input import build_step

BLOCK_SIZE, NUM_BLOCKS, KEY_DIM, VALUE_DIM, KV_HEADS, HEADS = 4, 40, 6, 5, 2, 4


@dataclass(frozen=True)
class Told:
    """A sequence with all its queries, keys and values, by position."""

    sequence: Sequence
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def reference(told: Told, start: int, end: int, window: int | None, softcap: float | None) -> torch.Tensor:
    """Position by position, as the definition says: (end - start, heads, value_dim)."""
    rows = []
    members = {position for span in told.sequence.layout.spans for position in span.members}
    for query in range(start, end):
        seen = [
            key
            for key in range(end)
            if (key <= query or {key, query} <= members) and (window is None or key > query - window)
        ]
        keys, values = (kept[seen].repeat_interleave(HEADS // KV_HEADS, dim=1) for kept in (told.keys, told.values))
        scores = torch.einsum("hd,khd->hk", told.queries[query], keys) * KEY_DIM**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values))
    return torch.stack(rows)


@st.composite
def sequences(draw: st.DrawFn) -> list[Told]:
    """Up to four, on blocks in any order, some with a span at their end."""
    lengths = draw(st.lists(st.integers(1, 38), min_size=1, max_size=4))
    blocks = draw(st.permutations(range(NUM_BLOCKS)) | st.just(list(range(NUM_BLOCKS))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    told = []
    for index, length in enumerate(lengths):
        span_length = draw(st.integers(0, length))
        spans = (BidirectionalSpan.of(range(length - span_length, length)),) if span_length > 1 else ()
        sequence = Sequence(str(index), [0] * length, length, [], 100, layout=PromptLayout(spans=spans))
        sequence.block_table = [blocks.pop() for _ in range(-(-length // BLOCK_SIZE))]
        shapes = ((HEADS, KEY_DIM), (KV_HEADS, KEY_DIM), (KV_HEADS, VALUE_DIM))
        told.append(Told(sequence, *(torch.randn(length, *shape, generator=generator) for shape in shapes)))
    return told


def attend(
    attention: CpuAttention, told: list[Told], sizes: list[int], window: int | None, softcap: float | None
) -> list[torch.Tensor]:
    """Runs a step of the next `sizes` positions of each; returns each one's output."""
    chunks = [ScheduledChunk(own.sequence, size) for own, size in zip(told, sizes, strict=True) if size]
    by_sequence = {id(own.sequence): own for own in told}
    chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
    step = build_step(chunks, block_size=BLOCK_SIZE, num_rope_axes=1, embedding_size=1, keeps_tokens=False)
    parts = [
        [getattr(by_sequence[id(chunk.sequence)], name)[chunk.start : chunk.end] for chunk in chunks]
        for name in ("queries", "keys", "values")
    ]
    queries, keys, values = (torch.cat(part) for part in parts)
    call = AttentionCall(0, queries, keys, values, None, softcap, window)
    outputs = torch.split(attention.prepare(step).attend(call), [chunk.num_tokens for chunk in chunks])
    by_chunk = {id(chunk.sequence): output for chunk, output in zip(chunks, outputs, strict=True)}
    for chunk in chunks:
        chunk.sequence.num_computed_tokens = chunk.end
    return [by_chunk.get(id(own.sequence), torch.empty(0, HEADS, VALUE_DIM)) for own in told]


@given(
    sequences(),
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
        layer = LayerShape(KV_HEADS, KEY_DIM, VALUE_DIM, window)
        attention = CpuAttention(
            [layer], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, windows_cut_spans=True
        )
        # A cut anywhere, then all but the last position, then that one alone, where no span forbids it.
        cut_ends = [own.sequence.last_whole(min(cut, len(own.keys) - 1)) for own, cut in zip(told, cuts, strict=False)]
        ends_of_steps = [cut_ends, [own.sequence.last_whole(len(own.keys) - 1) for own in told]]
        ends_of_steps.append([len(own.keys) for own in told])
        starts = [0] * len(told)
        for ends in ends_of_steps:
            sizes = [end - start for start, end in zip(starts, ends, strict=True)]
            outputs = attend(attention, told, sizes, window, softcap) if any(sizes) else []
            for own, start, end, output in zip(told, starts, ends, outputs, strict=False):
                if start < end:
                    expected = reference(own, start, end, window, softcap)
                    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
            starts = ends


def test_what_a_sequence_of_adjacent_blocks_has_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is: no copy of the cache is made for it."""
    layer = LayerShape(KV_HEADS, KEY_DIM, VALUE_DIM, None)
    attention = CpuAttention(
        [layer], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, windows_cut_spans=True
    )
    sequence = Sequence("a", [0] * 101, 100, [], 200, block_table=list(range(3, 29)), num_computed_tokens=100)
    step = build_step(
        [ScheduledChunk(sequence, 1)], block_size=BLOCK_SIZE, num_rope_axes=1, embedding_size=1, keeps_tokens=False
    )
    (stretches,) = attention.prepare(step).decodes
    assert stretches == {None: [slice(12, 113)]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_cache_of_another_dtype_is_near(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, KEY_DIM), (KV_HEADS, KEY_DIM), (KV_HEADS, VALUE_DIM))
    sequence = Sequence("a", [0] * 30, 30, [], 100, block_table=list(range(8)))
    told = Told(sequence, *(torch.randn(30, *shape, generator=generator) for shape in shapes))
    layer = LayerShape(KV_HEADS, KEY_DIM, VALUE_DIM, None)
    attention = CpuAttention([layer], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, windows_cut_spans=True)
    outputs = [attend(attention, [told], [size], None, None)[0] for size in (29, 1)]
    expected = reference(told, 0, 30, None, None)
    assert (torch.cat(outputs) - expected).abs().max() < 0.2
    assert not torch.equal(torch.cat(outputs), expected)
