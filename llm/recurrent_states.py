"""The states of layers without keys and values: linear attention, Mamba, short convolutions.

transformers' layer computes; it finds here what it expects of transformers' cache. A state lies in a slot. A running
sequence has a slot of its own, and snapshots at block bounds of earlier sequences have further ones, see
`BlockManager`. All chunks of a step read their states before any chunk writes one."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from raylens.cpu_kernels.library import KernelLibrary
from raylens.llm.indexers import INDEXED_LAYERS
from raylens.llm.reference_windows import REFERENCE_LAYERS
from raylens.llm.slot_states import SlotStates, waves_of
from raylens.llm.state_functions import takes_slots
from raylens.llm.step_input import StateChunk, StepInput

ATTENTION_LAYERS = INDEXED_LAYERS | REFERENCE_LAYERS | {"full_attention", "sliding_attention", "chunked_attention"}
STATE_LAYERS = frozenset({"linear_attention", "conv"})
STATELESS_LAYERS = frozenset({"mlp", "moe"})
"""The types of layers, in a configuration's `layer_types`, with a KV cache, with a state, and with neither. Chunked
attention is full attention here, because the context is no longer than a chunk."""

States = dict[str, torch.Tensor]
"""A layer's states by name, each (number of sequences, ...)."""
Run = Callable[[torch.Tensor, "_Cache"], torch.Tensor]
Decode = Callable[[Run, dict[str, SlotStates], torch.Tensor], torch.Tensor]


def has_state_layers(text_config: PreTrainedConfig) -> bool:
    return not STATE_LAYERS.isdisjoint(getattr(text_config, "layer_types", None) or ())


def num_attention_layers(text_config: PreTrainedConfig) -> int:
    types = getattr(text_config, "layer_types", None)
    if types is None:
        return int(text_config.num_hidden_layers)
    return sum(kind not in STATE_LAYERS | STATELESS_LAYERS for kind in types[: text_config.num_hidden_layers])


def find_mixers(decoder: nn.Module, text_config: PreTrainedConfig) -> list[nn.Module]:
    """Returns the modules with a state, one for each layer of such a type. Raises ValueError for a layer without."""
    types = getattr(text_config, "layer_types", None) or ()
    indices = [index for index, kind in enumerate(types) if kind in STATE_LAYERS]
    found: dict[int, nn.Module] = {}
    for module in decoder.modules():  # outer modules come first
        if (index := getattr(module, "layer_idx", None)) in indices:
            found[index] = module
    if len(found) < len(indices):
        raise ValueError(f"text models of type {type(decoder).__name__} are not supported: some layers have no state")
    return [found[index] for index in indices]


def number_attention_layers(decoder: nn.Module, without: Sequence[nn.Module] = ()) -> int:
    """Numbers the layers with a KV cache consecutively, as if they were all layers. Returns how many there are.
    `without`: attention modules that have no KV cache."""
    attending = [
        module for module in decoder.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")
    ]
    own = [module for module in attending if module not in without]
    for number, module in enumerate(own):
        module.layer_idx = number  # type: ignore[assignment]
    return len(own)


class RecurrentStates:
    """The states of all `mixers`, in `allocate`d slots. Each mixer's forward runs chunk by chunk from then on."""

    def __init__(self, mixers: Sequence[nn.Module], library: KernelLibrary | None) -> None:
        """`library`: computes single tokens where it can. None: without Raylens' kernels."""
        self._pools: list[States] = [{} for _ in mixers]
        self._shapes: list[States] = [{} for _ in mixers]
        self._step: _StateStep | None = None
        self.are_in_slots = True
        """Whether all layers compute guesses together with the tokens that they follow."""
        for layer, mixer in enumerate(mixers):
            decode = _decode
            if not takes_slots(mixer, library):
                decode, self.are_in_slots = _decode_by_wave, False
            names = inspect.signature(mixer.forward).parameters
            name = next(one for one in ("cache_params", "past_key_values") if one in names)
            mixer.forward = partial(self._forward, layer, partial(_run, mixer.forward, name), decode)

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of one slot, known after a first forward."""
        return sum(tensor.nbytes for shapes in self._shapes for tensor in shapes.values())

    def allocate(self, num_slots: int) -> None:
        """Makes room for the states of so many sequences and snapshots."""
        self._pools = [
            {name: tensor.new_zeros(num_slots, *tensor.shape[1:]) for name, tensor in shapes.items()}
            for shapes in self._shapes
        ]

    @contextmanager
    def of(self, step: StepInput) -> Iterator[None]:
        """Lets forwards within this context compute the chunks of `step`."""
        self._step = _StateStep(step)
        try:
            yield
        finally:
            self._step = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, layer: int, run: Run, decode: Decode, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Takes and returns (1, num_tokens, hidden_size)."""
        step, pool = self._step, self._pools[layer]
        if step is None:  # the first forward, which shows the shapes
            return run(hidden_states, _Cache(self._shapes[layer]))
        before = [_copies(pool, step.chunks[index].source) for index in step.others]
        output = torch.empty_like(hidden_states)
        if decoding := step.decoding:
            slots = {name: SlotStates(states, step.waves) for name, states in pool.items()}
            output[0, decoding] = decode(run, slots, hidden_states[0, decoding, None])[:, 0]
            for states, chunk in product(pool.values(), step.saving):
                states[chunk.save_to] = states[chunk.target]
        for index, states_before in zip(step.others, before, strict=True):
            rows = slice(step.starts[index], step.starts[index + 1])
            output[:, rows] = _extend(run, pool, step.chunks[index], states_before, hidden_states[:, rows])
        return output


class _StateStep:
    """The order of a step's chunks: `decoding` ones of a single token, in `waves`, and all `others`, by their indices.
    `saving`: decoding chunks that leave a snapshot. `starts`: of all chunks, in rows."""

    def __init__(self, step: StepInput) -> None:
        self.chunks = chunks = step.states or [StateChunk()] * len(step.query_lengths)
        self.starts = [0, *accumulate(step.query_lengths)]
        single = [
            (chunk.depth, chunk.target, row)
            for row, chunk in enumerate(chunks[: step.num_decodes])
            if chunk.source is not None
        ]
        self.decoding = [row for *_, row in sorted(single)]
        self.others = sorted(set(range(len(chunks))).difference(self.decoding))
        own = [chunks[row] for row in self.decoding]
        self.saving = [chunk for chunk in own if chunk.save_to is not None]
        self.waves = waves_of(own)


def _run(
    forward: Callable[..., torch.Tensor], cache_name: str, hidden_states: torch.Tensor, cache: "_Cache"
) -> torch.Tensor:
    return forward(hidden_states, **{cache_name: cache})


def _decode(run: Run, slots: dict[str, SlotStates], hidden_states: torch.Tensor) -> torch.Tensor:
    """Computes a token of each row, (num_rows, 1, hidden_size), by a layer that takes slots."""
    return run(hidden_states, _Cache(slots))


def _decode_by_wave(run: Run, slots: dict[str, SlotStates], hidden_states: torch.Tensor) -> torch.Tensor:
    """Computes a token of each row by any layer, which reads its weights for each wave."""
    outputs = []
    for wave in next(iter(slots.values())).waves:
        cache = _Cache({name: states.read(wave) for name, states in slots.items()})
        outputs.append(run(hidden_states[wave.rows], cache))
        for name, states in slots.items():
            states.write(wave, cache.states[name])
    return torch.cat(outputs)


def _extend(run: Run, pool: States, chunk: StateChunk, states: States, hidden_states: torch.Tensor) -> torch.Tensor:
    """Computes the next tokens of one sequence, (1, num_tokens, hidden_size), up to the snapshot and behind it."""
    cache = _Cache(states)
    end = hidden_states.shape[1] if chunk.save_to is None else chunk.save_at
    outputs = [run(hidden_states[:, :end], cache)]
    _write(pool, chunk.save_to, cache.states)
    if end < hidden_states.shape[1]:
        outputs.append(run(hidden_states[:, end:], cache))
    _write(pool, chunk.target, cache.states)
    return torch.cat(outputs, dim=1)


def _copies(pool: States, slot: int | None) -> States:
    """Returns copies of the states in a slot, each (1, ...); none for the first chunk of a sequence."""
    return {} if slot is None else {name: states[slot : slot + 1].clone() for name, states in pool.items()}


def _write(pool: States, slot: int | None, states: States) -> None:
    for name, state in states.items() if slot is not None else ():
        pool[name][slot] = state[0]


class _Cache:
    """What a layer takes for transformers' cache: the states of one call, see `LinearAttentionLayer` there."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(f"conv {state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(f"recurrent {state_idx}")

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> torch.Tensor:
        """Returns the earlier inputs of the convolution, if there are any, and the new ones. Keeps the last ones."""
        before = self.get_conv_state(layer_idx, state_idx)
        lacking = max(0, conv_kernel_size - conv_states.shape[-1])
        inputs = (
            nn.functional.pad(conv_states, (lacking, 0)) if before is None else torch.cat([before, conv_states], -1)
        )
        self.states[f"conv {state_idx}"] = inputs[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.states[f"recurrent {state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False
