"""What attention over a paged cache is compared with: sequences on blocks anywhere, and the definition."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from raylens.llm.attention import AttentionCall, LayerShape, PagedAttention
from raylens.llm.prompt_layout import BidirectionalSpan, PromptLayout
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence
from raylens.llm.step_input import StepBuilder

BLOCK_SIZE, NUM_BLOCKS = 4, 40
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 6
    value_dim: int = 5

    def layer(self, window: int | None) -> LayerShape:
        return LayerShape(self.kv_heads, self.key_dim, self.value_dim, window)


@dataclass(frozen=True)
class Told:
    """A sequence with all its queries, keys and values, by position."""

    sequence: Sequence
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(cls, sequence: Sequence, shape: Shape, generator: torch.Generator) -> "Told":
        sizes = ((shape.heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim))
        return cls(sequence, *(torch.randn(sequence.num_tokens, *size, generator=generator) for size in sizes))


def reference(told: Told, start: int, end: int, window: int | None, softcap: float | None) -> torch.Tensor:
    """Position by position, as the definition says: (end - start, heads, value_dim)."""
    rows = []
    members = {position for span in told.sequence.layout.spans for position in span.members}
    groups = told.queries.shape[1] // told.keys.shape[1]
    for query in range(start, end):
        seen = [
            key
            for key in range(end)
            if (key <= query or {key, query} <= members) and (window is None or key > query - window)
        ]
        keys, values = (kept[seen].repeat_interleave(groups, dim=1) for kept in (told.keys, told.values))
        scores = torch.einsum("hd,khd->hk", told.queries[query], keys) * told.queries.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values))
    return torch.stack(rows)


@st.composite
def sequences(draw: st.DrawFn, shape: Shape) -> list[Told]:
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
        told.append(Told.random(sequence, shape, generator))
    return told


def make_builder() -> StepBuilder:
    return StepBuilder(
        max_num_tokens=BLOCK_SIZE * NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_rope_axes=1,
        keeps_tokens=False,
    )


def attend(
    attention: PagedAttention,
    told: list[Told],
    sizes: list[int],
    window: int | None,
    softcap: float | None,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """Runs a step of the next `sizes` positions of each on `device`; returns each one's output."""
    chunks = [ScheduledChunk(own.sequence, size) for own, size in zip(told, sizes, strict=True) if size]
    by_sequence = {id(own.sequence): own for own in told}
    chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
    step = make_builder().build(chunks)
    parts = [
        [getattr(by_sequence[id(chunk.sequence)], name)[chunk.start : chunk.end] for chunk in chunks]
        for name in ("queries", "keys", "values")
    ]
    queries, keys, values = (torch.cat(part).to(device) for part in parts)
    call = AttentionCall(0, queries, keys, values, queries.shape[-1] ** -0.5, softcap, window)
    outputs = attention.prepare(step.to(device)).attend(call).cpu()
    by_chunk = {
        id(chunk.sequence): output
        for chunk, output in zip(chunks, torch.split(outputs, [chunk.num_tokens for chunk in chunks]), strict=True)
    }
    for chunk in chunks:
        chunk.sequence.num_computed_tokens = chunk.end
    nothing = outputs[:0]
    return [by_chunk.get(id(own.sequence), nothing) for own in told]


def check_in_steps(
    attention: PagedAttention,
    told: list[Told],
    cuts: list[int],
    window: int | None,
    softcap: float | None,
    device: torch.device = CPU,
) -> None:
    """Attends to about `cuts` positions of each, then to all others but the last, then to that one, as far as spans
    allow that, and compares with the definition."""
    steps = [[own.sequence.last_whole(min(cut, len(own.keys) - 1)) for own, cut in zip(told, cuts, strict=False)]]
    steps.append([own.sequence.last_whole(len(own.keys) - 1) for own in told])
    steps.append([len(own.keys) for own in told])
    starts = [0] * len(told)
    for ends in steps:
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        outputs = attend(attention, told, sizes, window, softcap, device) if any(sizes) else []
        for own, start, end, output in zip(told, starts, ends, outputs, strict=False):
            if start < end:
                expected = reference(own, start, end, window, softcap)
                torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        starts = ends
