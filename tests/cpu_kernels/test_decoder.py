"""A decoder in one call: near the definition of its layers, and a row is the same to the last bit among any others."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, silu

from raylens.cpu_kernels.attention import LayerCache, StepChunks
from raylens.cpu_kernels.decoder import Decoder, DecoderLayer, Embedding
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.mlp import Activation, Linear
from raylens.cpu_kernels.norm import Norm
from raylens.cpu_kernels.rotary import Rope
from tests.cpu_kernels.packing import pack

BLOCK_SIZE, NUM_BLOCKS, NUM_POSITIONS = 4, 60, 500
EVERY_LIBRARY = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@dataclass(frozen=True)
class Sizes:
    hidden: int = 24
    inner: int = 40
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 12
    value_dim: int = 12
    rope_dim: int = 8
    num_axes: int = 1
    num_levels: int = 0
    has_head_norms: bool = False
    has_outer_norms: bool = False
    has_biases: bool = False
    softcap: float | None = None
    window: int | None = None
    activation: Activation = "silu"


class Model:
    """Random weights of two layers, as plain tensors and as the library reads them."""

    def __init__(self, library: KernelLibrary, sizes: Sizes, seed: int = 0) -> None:
        self.library, self.sizes = library, sizes
        self._generator = torch.Generator().manual_seed(seed)
        self.matrices: dict[int, torch.Tensor] = {}
        dim = sizes.rope_dim
        angles = torch.arange(NUM_POSITIONS)[:, None] / 100 ** (torch.arange(dim // 2) / dim)
        axes = torch.arange(dim // 2).remainder(sizes.num_axes).repeat(2)
        self.rope = Rope(angles.cos().repeat(1, 2).contiguous(), angles.sin().repeat(1, 2).contiguous(), axes)
        self.final_norm = self._norm(sizes.hidden)
        self.layers = [self._layer() for _ in range(2)]
        self.decoder = Decoder(
            library,
            self.layers,
            [self.rope],
            hidden_size=sizes.hidden,
            heads=sizes.kv_heads * sizes.group,
            activation=sizes.activation,
            final_norm=self.final_norm,
        )

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _norm(self, dim: int) -> Norm:
        return Norm(self._random(dim), 1e-5)

    def _linear(self, rows_out: int, num_k: int) -> Linear:
        weight = self._random(rows_out, num_k) * num_k**-0.5
        own = linear(self.library, weight, self._random(rows_out) if self.sizes.has_biases else None)
        self.matrices[id(own.weight)] = weight
        return own

    def _layer(self) -> DecoderLayer:
        sizes = self.sizes
        heads = sizes.kv_heads * sizes.group
        cache = LayerCache(
            self.library,
            kv_heads=sizes.kv_heads,
            num_slots=NUM_BLOCKS * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
        )
        return DecoderLayer(
            input_norm=self._norm(sizes.hidden),
            query=self._linear(heads * sizes.key_dim, sizes.hidden),
            key=self._linear(sizes.kv_heads * sizes.key_dim, sizes.hidden),
            value=self._linear(sizes.kv_heads * sizes.value_dim, sizes.hidden),
            query_norm=self._norm(sizes.key_dim) if sizes.has_head_norms else None,
            key_norm=self._norm(sizes.key_dim) if sizes.has_head_norms else None,
            output=self._linear(sizes.hidden, heads * sizes.value_dim),
            attention_norm=self._norm(sizes.hidden) if sizes.has_outer_norms else None,
            mlp_input_norm=self._norm(sizes.hidden),
            gate=self._linear(sizes.inner, sizes.hidden),
            up=self._linear(sizes.inner, sizes.hidden),
            down=self._linear(sizes.hidden, sizes.inner),
            mlp_norm=self._norm(sizes.hidden) if sizes.has_outer_norms else None,
            cache=cache,
            rope=0,
            scaling=sizes.key_dim**-0.5,
            softcap=sizes.softcap,
            window=sizes.window,
        )

    def run(self, sequences: list["Told"], news: list[int], wanted: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The hidden states of the next `news` tokens of each. Those of the step's rows `wanted` only, where that is
        given."""
        slots, tables, ends, positions, level_rows, levels = [], [], [], [], [], []
        hidden: list[torch.Tensor] = []
        for told, num_new in zip(sequences, news, strict=True):
            own = torch.arange(told.num_done, told.num_done + num_new)
            slots.append(torch.tensor(told.blocks)[own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE)
            tables.append(told.blocks)
            ends.append(told.num_done + num_new)
            positions.append(told.positions[:, own])
            has_levels = told.has_levels[own]
            level_rows.append(sum(len(rows) for rows in hidden) + has_levels.nonzero()[:, 0])
            levels.append(told.levels[own][has_levels])
            hidden.append(told.embeds[own])
            told.num_done += num_new
        step = StepChunks(torch.cat(slots), tables, news, ends, [told.num_prompt for told in sequences])
        rows = torch.cat(hidden)
        assert self.decoder.run(
            step,
            torch.cat(positions, dim=1).contiguous(),
            rows,
            logits_rows=wanted,
            wants_all_hidden=wanted is None,
            level_rows=torch.cat(level_rows),
            levels=torch.cat(levels),
        )
        return list(torch.split(rows, news))

    def reference(self, told: "Told") -> torch.Tensor:
        """All hidden states of a sequence, by the definition, in float64."""
        hidden = told.embeds.double()
        added = torch.split((told.levels * told.has_levels[:, None]).double(), self.sizes.hidden, dim=1)
        for number, layer in enumerate(self.layers):
            attended = self._linear_of(layer.output, self._attend(layer, told, norm(layer.input_norm, hidden)))
            hidden = hidden + norm(layer.attention_norm, attended)
            x = norm(layer.mlp_input_norm, hidden)
            gate = self._linear_of(layer.gate, x)
            gate = silu(gate) if self.sizes.activation == "silu" else gelu(gate, approximate="tanh")
            hidden = hidden + norm(layer.mlp_norm, self._linear_of(layer.down, gate * self._linear_of(layer.up, x)))
            if number < self.sizes.num_levels:
                hidden = hidden + added[number]
        return norm(self.final_norm, hidden).float()

    def _linear_of(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        bias = None if linear.bias is None else linear.bias.double()
        return torch.nn.functional.linear(x, self.matrices[id(linear.weight)].double(), bias)

    def _attend(self, layer: DecoderLayer, told: "Told", x: torch.Tensor) -> torch.Tensor:
        sizes, length = self.sizes, len(x)
        queries, keys, values = (
            self._linear_of(linear, x).view(length, -1, dim)
            for linear, dim in (
                (layer.query, sizes.key_dim),
                (layer.key, sizes.key_dim),
                (layer.value, sizes.value_dim),
            )
        )
        queries = self._turn(told, norm(layer.query_norm, queries))
        keys = self._turn(told, norm(layer.key_norm, keys)).repeat_interleave(sizes.group, dim=1)
        values = values.repeat_interleave(sizes.group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * layer.scaling
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        is_seen = distance >= 0 if layer.window is None else (distance >= 0) & (distance < layer.window)
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

    def _turn(self, told: "Told", heads: torch.Tensor) -> torch.Tensor:
        dim = self.sizes.rope_dim
        own = told.positions[self.rope.axes].T  # (length, dim)
        cosines, sines = (table.gather(0, own).double()[:, None] for table in (self.rope.cosines, self.rope.sines))
        x, rest = heads[..., :dim], heads[..., dim:]
        rotated = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
        return torch.cat([x * cosines + rotated * sines, rest], dim=-1)


def norm(own: Norm | None, x: torch.Tensor) -> torch.Tensor:
    if own is None:
        return x
    return x * (x.square().mean(-1, keepdim=True) + own.eps).rsqrt() * own.weight.double()


@dataclass
class Told:
    """A sequence: its embeddings (length, hidden), positions (axes, length), blocks, and how long its prompt is. The
    tokens that `has_levels` names take deepstack embeddings, of `levels` (length, levels * hidden)."""

    embeds: torch.Tensor
    positions: torch.Tensor
    blocks: list[int]
    num_prompt: int
    levels: torch.Tensor
    has_levels: torch.Tensor
    num_done: int = 0


@st.composite
def models(draw: st.DrawFn) -> Sizes:
    key_dim = draw(st.integers(2, 40))
    return Sizes(
        # Of fewer values, a norm may magnify the rounding of a sum near 0.
        hidden=draw(st.integers(4, 70)),
        inner=draw(st.integers(1, 90)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        key_dim=key_dim,
        value_dim=draw(st.integers(1, 40)),
        rope_dim=2 * draw(st.integers(1, key_dim // 2)),
        num_axes=draw(st.sampled_from([1, 3])),
        num_levels=draw(st.integers(0, 2)),
        has_head_norms=draw(st.booleans()),
        has_outer_norms=draw(st.booleans()),
        has_biases=draw(st.booleans()),
        softcap=draw(st.none() | st.just(2.0)),
        window=draw(st.none() | st.integers(1, 20)),
        activation=draw(st.sampled_from(["silu", "gelu_tanh"])),
    )


def make_sequences(sizes: Sizes, lengths: list[int], blocks: list[int], seed: int) -> list[Told]:
    generator = torch.Generator().manual_seed(seed)
    blocks = list(blocks)
    return [
        Told(
            torch.randn(length, sizes.hidden, generator=generator),
            torch.randint(NUM_POSITIONS, (sizes.num_axes, length), generator=generator),
            [blocks.pop() for _ in range(-(-length // BLOCK_SIZE))],
            int(torch.randint(length + 1, (), generator=generator)),
            torch.randn(length, sizes.num_levels * sizes.hidden, generator=generator),
            torch.rand(length, generator=generator) < 0.4,
        )
        for length in lengths
    ]


@EVERY_LIBRARY
@given(
    sizes=models(),
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=4),
    cut=st.integers(1, 49),
    blocks=st.permutations(range(NUM_BLOCKS)),
    seed=st.integers(0, 2**32),
)
def test_any_steps_give_what_is_defined(
    library: KernelLibrary, sizes: Sizes, lengths: list[int], cut: int, blocks: list[int], seed: int
) -> None:
    """The beginnings of prompts, then their ends, of which some are single tokens: together, and each alone."""
    model = Model(library, sizes, seed)
    sequences = make_sequences(sizes, lengths, blocks, seed)
    cuts = [min(cut, length - 1) for length in lengths]
    rests = [length - own for length, own in zip(lengths, cuts, strict=True)]
    parts = zip(model.run(sequences, cuts), model.run(sequences, rests), strict=True)
    outputs = [torch.cat(own) for own in parts]
    for index, (told, output) in enumerate(zip(sequences, outputs, strict=True)):
        torch.testing.assert_close(output, model.reference(told), rtol=1e-3, atol=1e-4)
        told.num_done, told.blocks = 0, list(range(len(told.blocks)))
        (first,), (second,) = model.run([told], [cuts[index]]), model.run([told], [rests[index]])
        assert torch.equal(torch.cat([first, second]), output), "other than alone and on blocks in order"


@EVERY_LIBRARY
@given(
    sizes=models(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def test_wanted_rows_are_the_same_without_the_others(
    library: KernelLibrary, sizes: Sizes, lengths: list[int], data: st.DataObject, seed: int
) -> None:
    """And the cache gets the keys and values of all rows, also where none is wanted."""
    model = Model(library, sizes, seed)
    sequences = make_sequences(sizes, lengths, list(range(NUM_BLOCKS)), seed)
    wanted = torch.tensor(sorted(data.draw(st.sets(st.integers(0, sum(lengths) - 1)))), dtype=torch.int64)
    results = []
    for own in (None, wanted):
        for told in sequences:
            told.num_done = 0
        caches = [cache for layer in model.layers for cache in (layer.cache.keys, layer.cache.values)]
        for cache in caches:
            cache.fill_(7)
        hidden = torch.cat(model.run(sequences, lengths, own))
        results.append([hidden[wanted], *(cache.clone() for cache in caches)])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found)


def test_many_rows_and_a_deep_product(library: KernelLibrary) -> None:
    """Rows that several threads share, and sums that are computed in parts."""
    sizes = Sizes(hidden=40, inner=2100)
    model = Model(library, sizes)
    (told,) = make_sequences(sizes, [150], list(range(NUM_BLOCKS)), seed=1)
    (output,) = model.run([told], [150])
    torch.testing.assert_close(output, model.reference(told), rtol=1e-3, atol=1e-4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for _ in range(20):
            told.num_done = 0
            assert torch.equal(model.run([told], [150])[0], output)
    finally:
        torch.set_num_threads(before)


def test_a_position_beyond_the_table_changes_nothing(library: KernelLibrary) -> None:
    model = Model(library, Sizes(num_axes=3))
    hidden = torch.randn(1, model.sizes.hidden)
    step = StepChunks(torch.tensor([0]), [[0]], [1], [1], [0])
    for axis in range(3):
        positions: Any = torch.zeros(3, 1, dtype=torch.int64)
        positions[axis] = NUM_POSITIONS
        before = hidden.clone()
        assert not model.decoder.run(step, positions, hidden)
        assert torch.equal(hidden, before)


@pytest.mark.parametrize("num_tokens", [1, 3, 30])
def test_the_embedding_and_the_head_belong_to_the_call(library: KernelLibrary, num_tokens: int) -> None:
    model = Model(library, Sizes())
    size, weight, scale = model.sizes.hidden, torch.randn(50, model.sizes.hidden), 1.5
    head = linear(library, torch.randn(37, size), torch.randn(37))
    decoder = Decoder(
        library,
        model.layers,
        [model.rope],
        hidden_size=size,
        heads=4,
        activation="silu",
        final_norm=model.final_norm,
        embedding=Embedding(pack(library, weight), scale),
        head=head,
    )
    token_ids = torch.randint(50, (num_tokens,))
    chunks = StepChunks(torch.arange(num_tokens), [list(range(8))], [num_tokens], [num_tokens], [num_tokens])
    positions = torch.arange(num_tokens)[None]
    rows = torch.arange(0, num_tokens, 2)
    expected, hidden = weight[token_ids] * scale, torch.full((num_tokens, size), torch.nan)
    assert model.decoder.run(chunks, positions, expected)
    logits = torch.full((len(rows), 37), torch.nan)
    assert decoder.run(chunks, positions, hidden, token_ids=token_ids, logits_rows=rows, logits=logits)
    assert torch.equal(hidden, expected)
    assert torch.equal(logits, head.weight.product(hidden[rows], head.bias))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_are_exact_over_the_whole_range(library: KernelLibrary, activation: Activation) -> None:
    """Each number of the hidden states, which are 0, gets the activation of another number."""
    x = torch.linspace(-30, 30, 1201)
    sizes = Sizes(hidden=len(x), inner=len(x), activation=activation)
    nothing, identity = torch.zeros(len(x), len(x)), torch.eye(len(x))
    model = Model(library, sizes)
    layer = replace(
        model.layers[0],
        value=linear(library, torch.zeros(sizes.kv_heads * sizes.value_dim, len(x)), None),
        gate=linear(library, nothing, x),
        up=linear(library, nothing, torch.ones(len(x))),
        down=linear(library, identity, None),
    )
    # A norm with a huge eps divides by a constant, 2^20, which its weight takes back.
    final_norm = Norm(torch.full((len(x),), 2.0**20), 2.0**40)
    decoder = Decoder(
        library, [layer], [model.rope], hidden_size=len(x), heads=4, activation=activation, final_norm=final_norm
    )
    hidden = torch.zeros(1, len(x))
    step = StepChunks(torch.tensor([0]), [[0]], [1], [1], [0])
    assert decoder.run(step, torch.zeros(1, 1, dtype=torch.int64), hidden)
    expected = silu(x.double()) if activation == "silu" else gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(hidden[0], expected.float(), rtol=2e-6, atol=1e-6)


def linear(library: KernelLibrary, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return Linear(pack(library, weight), bias)
