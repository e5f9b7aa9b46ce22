"""Attention over a paged cache: near the definition, wherever blocks lie, and the same to the last bit among others."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raylens.cpu_kernels.attention import NO_SPAN, LayerCache, StepChunks, attend
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.packed_weight import EXACT

EVERY_LIBRARY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROUNDED = 1
"""The `row_parts` that let the library for AMX round. The others compute in float32 as before."""


@dataclass(frozen=True)
class Layer:
    kv_heads: int = 2
    group: int = 3
    key_dim: int = 20
    value_dim: int = 12
    block_size: int = 4
    window: int | None = None
    softcap: float | None = None
    windows_cut_spans: bool = True


@dataclass(frozen=True)
class Told:
    """A sequence by position, its last `num_new` positions to be computed now: queries (positions, heads, key_dim),
    keys and values (positions, kv_heads, dim). The first `num_prompt` positions are its prompt's. `spans`: the number
    of each position's span, or none at all."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    blocks: list[int]
    num_new: int
    num_prompt: int
    spans: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.keys)


def make_sequence(
    layer: Layer, length: int, num_new: int, blocks: list[int], seed: int, num_prompt: int | None = None
) -> Told:
    """All of the prompt, where no other number is given."""
    generator = torch.Generator().manual_seed(seed)
    heads = layer.kv_heads * layer.group
    queries = torch.randn(length, heads, layer.key_dim, generator=generator)
    keys = torch.randn(length, layer.kv_heads, layer.key_dim, generator=generator)
    values = torch.randn(length, layer.kv_heads, layer.value_dim, generator=generator)
    return Told(queries, keys, values, blocks, num_new, length if num_prompt is None else num_prompt)


def slots(told: Told, layer: Layer, start: int = 0) -> torch.Tensor:
    positions = torch.arange(start, told.length)
    return torch.tensor(told.blocks)[positions // layer.block_size] * layer.block_size + positions % layer.block_size


def run(library: KernelLibrary, layer: Layer, sequences: list[Told], row_parts: int = EXACT) -> list[torch.Tensor]:
    """Each sequence's output, (num_new, heads, value_dim). What no sequence owns of the cache holds NaN, which would
    show in any result."""
    num_blocks = max(max(told.blocks) for told in sequences) + 1
    cache = LayerCache(
        library,
        kv_heads=layer.kv_heads,
        num_slots=num_blocks * layer.block_size,
        block_size=layer.block_size,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
    )
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    for told in sequences:
        old = slots(told, layer)[: told.length - told.num_new]
        cache.keys[:, old] = told.keys[: len(old)].transpose(0, 1)
        cache.values[:, old] = told.values[: len(old)].transpose(0, 1)
    step = StepChunks(
        torch.cat([slots(told, layer, told.length - told.num_new) for told in sequences]),
        [told.blocks for told in sequences],
        [told.num_new for told in sequences],
        [told.length for told in sequences],
        [told.num_prompt for told in sequences],
        spans={chunk: told.spans for chunk, told in enumerate(sequences) if told.spans},
        windows_cut_spans=layer.windows_cut_spans,
    )
    queries, keys, values = (
        torch.cat([getattr(told, name)[told.length - told.num_new :] for told in sequences])
        for name in ("queries", "keys", "values")
    )
    # As transformers hands them over: with the tokens innermost but one.
    queries = queries.transpose(0, 1).contiguous().transpose(0, 1)
    output = attend(
        library,
        step,
        cache,
        queries,
        keys,
        values,
        scaling=layer.key_dim**-0.5,
        softcap=layer.softcap,
        window=layer.window,
        row_parts=row_parts,
    )
    return list(torch.split(output, [told.num_new for told in sequences]))


def reference(layer: Layer, told: Told, *, rounds: bool = False) -> torch.Tensor:
    """By the definition, in float64. `rounds`: with values in bfloat16."""
    rounded = told.values.bfloat16() if rounds else told.values
    keys, values = (kept.double().repeat_interleave(layer.group, dim=1) for kept in (told.keys, rounded))
    positions = torch.arange(told.length)
    queries = positions[told.length - told.num_new :]
    scores = torch.einsum("qhd,khd->hqk", told.queries[queries].double(), keys) * layer.key_dim**-0.5
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    is_seen = positions <= queries[:, None]
    in_window = positions > queries[:, None] - (layer.window or told.length)
    is_seen &= in_window
    if told.spans:
        spans = torch.tensor(told.spans)
        is_of_span = (spans[queries][:, None] == spans) & (spans != NO_SPAN)
        is_seen |= is_of_span & in_window if layer.windows_cut_spans else is_of_span
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), values).float()


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    return Layer(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 5)),
        key_dim=draw(st.integers(1, 70) | st.sampled_from([64, 128, 256])),
        value_dim=draw(st.integers(1, 70) | st.sampled_from([64, 128, 256])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        window=draw(st.none() | st.integers(1, 200)),
        softcap=draw(st.none() | st.floats(0.5, 30)),
        windows_cut_spans=draw(st.booleans()),
    )


@st.composite
def steps(draw: st.DrawFn, layer: Layer) -> list[Told]:
    """Up to four sequences on blocks in any order."""
    lengths = draw(st.lists(st.integers(1, 40) | st.integers(120, 300), min_size=1, max_size=4))
    news = [(min(draw(st.integers(1, 60)), length), length) for length in lengths]
    needed = [-(-length // layer.block_size) for _, length in news]
    blocks = draw(st.permutations(range(sum(needed))) | st.just(list(range(sum(needed)))))
    seed = draw(st.integers(0, 2**32))
    sequences = []
    for index, ((num_new, length), count) in enumerate(zip(news, needed, strict=True)):
        own = [blocks.pop() for _ in range(count)]
        told = make_sequence(layer, length, num_new, own, seed + index, draw(st.integers(0, length)))
        sequences.append(replace(told, spans=draw(spans_of(told))))
    return sequences


@st.composite
def spans_of(draw: st.DrawFn, told: Told) -> list[int]:
    """Spans apart from each other, with gaps between their members, in the prompt. Often none."""
    ends = sorted(draw(st.sets(st.integers(0, told.num_prompt), max_size=6)))
    gaps = draw(st.sampled_from([1, 2, 3]))
    spans = [NO_SPAN] * told.length
    for number, (start, end) in enumerate(zip(ends[::2], ends[1::2], strict=False)):
        spans[start:end:gaps] = [number] * len(range(start, end, gaps))
    return spans if ends else []


@EVERY_LIBRARY
@given(data=st.data(), layer=layers())
def test_any_step_attends_as_defined(library: KernelLibrary, data: st.DataObject, layer: Layer) -> None:
    sequences = data.draw(steps(layer))
    outputs = run(library, layer, sequences)
    for told, output in zip(sequences, outputs, strict=True):
        torch.testing.assert_close(output, reference(layer, told), rtol=1e-4, atol=2e-5)
        alone = replace(told, blocks=list(range(len(told.blocks))))
        assert torch.equal(run(library, layer, [alone])[0], output), "other than alone and on blocks in order"


@EVERY_LIBRARY
@given(data=st.data(), layer=layers())
def test_prompts_weigh_values_in_bfloat16_where_they_may(
    library: KernelLibrary, data: st.DataObject, layer: Layer
) -> None:
    sequences = data.draw(steps(layer))
    outputs = run(library, layer, sequences, ROUNDED)
    for told, output in zip(sequences, outputs, strict=True):
        of_prompt = max(0, told.num_prompt - (told.length - told.num_new))
        expected = reference(layer, told, rounds=library.build == "amx")[:of_prompt]
        # The weights of the softmax are rounded, too, each by at most 2^-9 of itself.
        error = 2**-9 * told.values.abs().max().item() + 2e-5
        torch.testing.assert_close(output[:of_prompt], expected, rtol=1e-4, atol=error)
        torch.testing.assert_close(output[of_prompt:], reference(layer, told)[of_prompt:], rtol=1e-4, atol=2e-5)
        alone = replace(told, blocks=list(range(len(told.blocks))))
        assert torch.equal(run(library, layer, [alone], ROUNDED)[0], output), "other than alone and on blocks in order"


@pytest.mark.parametrize("row_parts", [EXACT, ROUNDED])
@pytest.mark.parametrize("window", [None, 50, 130])
def test_a_prompt_may_be_cut_anywhere(library: KernelLibrary, window: int | None, row_parts: int) -> None:
    """To the last bit, and between single tokens: what others are in a step decides where a prompt is cut. Generated
    tokens may be computed again in one go, after a preemption."""
    layer = Layer(window=window)
    spans = [0 if 20 <= position < 60 else 1 if 130 <= position < 240 else NO_SPAN for position in range(300)]
    for num_prompt, own in ((300, []), (300, spans), (270, spans), (0, [])):
        whole = replace(make_sequence(layer, 300, 300, list(range(75)), 0, num_prompt), spans=own)
        (expected,) = run(library, layer, [whole], row_parts)
        for cut in (2, 7, 128, 129, 250, 270, 298, 299):
            assert torch.equal(run(library, layer, [replace(whole, num_new=300 - cut)], row_parts)[0], expected[cut:])
        for end in (260, 270, 280):
            queries, keys, values = whole.queries[:end], whole.keys[:end], whole.values[:end]
            single = Told(queries, keys, values, whole.blocks, 1, min(num_prompt, end), whole.spans[:end])
            assert torch.equal(run(library, layer, [single], row_parts)[0], expected[end - 1 : end])


@pytest.mark.parametrize("num_prompt", [1, 2])
def test_weights_are_exact_over_the_whole_range(library: KernelLibrary, num_prompt: int) -> None:
    """Two scores, 0 and x, weigh two values, 0 and 1: the result is 1 / (1 + e^-x)."""
    layer = Layer(kv_heads=1, group=1, key_dim=1, value_dim=1)
    for x in torch.linspace(-80, 80, 641).tolist():
        keys, values = torch.tensor([0.0, x]), torch.tensor([0.0, 1.0])
        told = Told(torch.ones(2, 1, 1), keys.view(2, 1, 1), values.view(2, 1, 1), [0], 1, num_prompt)
        output = run(library, layer, [told])[0][-1].item()
        assert output == pytest.approx(torch.tensor(x).double().sigmoid().item(), rel=5e-7)


@pytest.mark.parametrize("num_prompt", [1, 2])
def test_caps_are_exact_over_the_whole_range(library: KernelLibrary, num_prompt: int) -> None:
    layer = Layer(kv_heads=1, group=1, key_dim=1, value_dim=1, softcap=1.0)
    for x in torch.linspace(-12, 12, 481).tolist():
        told = Told(
            torch.ones(2, 1, 1), torch.tensor([[[0.0]], [[x]]]), torch.tensor([[[0.0]], [[1.0]]]), [0], 1, num_prompt
        )
        output = run(library, layer, [told])[0][-1].item()
        assert output == pytest.approx(torch.tensor(x).double().tanh().sigmoid().item(), rel=5e-7)
