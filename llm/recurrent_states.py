"""The states of layers without keys and values: linear attention, Mamba, short convolutions.

transformers' layer computes; it finds here what it expects of transformers' cache. A state lies in a slot. A running
sequence has a slot of its own, and snapshots at block bounds of earlier sequences have further ones, see
`BlockManager`. All chunks of a step read their states before any chunk writes one."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from raylens.llm.step_input import StateChunk, StepInput

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
STATE_LAYERS = frozenset({"linear_attention", "conv"})
STATELESS_LAYERS = frozenset({"mlp", "moe"})
"""The types of layers, in a configuration's `layer_types`, with a KV cache, with a state, and with neither. Chunked
attention is full attention here, because the context is no longer than a chunk."""

States = dict[str, torch.Tensor]
"""A layer's states by name, each (number of sequences, ...)."""
Slots = list[int | None]
Run = Callable[..., torch.Tensor]


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


def number_attention_layers(decoder: nn.Module) -> None:
    """Numbers the layers with a KV cache consecutively, as if they were all layers."""
    own = [module for module in decoder.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]
    for number, module in enumerate(own):
        module.layer_idx = number  # type: ignore[assignment]


class RecurrentStates:
    """The states of all `mixers`, in `allocate`d slots. Each mixer's forward runs chunk by chunk from then on."""

    def __init__(self, mixers: Sequence[nn.Module]) -> None:
        self._pools: list[States] = [{} for _ in mixers]
        self._shapes: list[States] = [{} for _ in mixers]
        self._step: StepInput | None = None
        for layer, mixer in enumerate(mixers):
            names = inspect.signature(mixer.forward).parameters
            name = next(one for one in ("cache_params", "past_key_values") if one in names)
            mixer.forward = partial(self._forward, layer, mixer.forward, name)

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
        self._step = step
        try:
            yield
        finally:
            self._step = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(
        self, layer: int, forward: Callable[..., torch.Tensor], cache_name: str, hidden_states: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """Takes and returns (1, num_tokens, hidden_size)."""
        step, pool = self._step, self._pools[layer]
        if step is None:  # the first forward, which shows the shapes
            cache = _Cache(self._shapes[layer])
            return forward(hidden_states, **{cache_name: cache})
        run = partial(_run, forward, cache_name)
        chunks = step.states or [StateChunk()] * len(step.query_lengths)
        decoding = [row for row in range(step.num_decodes) if chunks[row].source is not None]
        decoding.sort(key=lambda row: (chunks[row].depth, chunks[row].target or 0))
        others = [index for index in range(len(chunks)) if index not in decoding]
        before = [_copies(pool, [chunks[index].source]) for index in others]
        starts = [0, *accumulate(step.query_lengths)]
        output = torch.empty_like(hidden_states)
        for _, alike in groupby(decoding, key=lambda row: chunks[row].depth):  # a guess follows its predecessor
            rows_ = list(alike)
            output[0, rows_] = _decode(run, pool, [chunks[row] for row in rows_], hidden_states[0, rows_, None])
        for index, states in zip(others, before, strict=True):
            rows = slice(starts[index], starts[index + 1])
            output[:, rows] = _extend(run, pool, chunks[index], states, hidden_states[:, rows])
        return output


def _run(forward: Run, cache_name: str, hidden_states: torch.Tensor, cache: "_Cache") -> torch.Tensor:
    return forward(hidden_states, **{cache_name: cache})


def _decode(run: Run, pool: States, chunks: Sequence[StateChunk], hidden_states: torch.Tensor) -> torch.Tensor:
    """Computes one token of each sequence, (num_sequences, 1, hidden_size). Returns (num_sequences, hidden_size)."""
    sources, targets = [chunk.source for chunk in chunks], [chunk.target for chunk in chunks]
    place = _place(targets)
    cache = _Cache(_at(pool, place) if sources == targets else _copies(pool, sources))
    output = run(hidden_states, cache)[:, 0]
    for name, state in cache.states.items():
        is_changed_in_place = isinstance(place, slice) and state.data_ptr() == pool[name][place].data_ptr()
        if not is_changed_in_place:
            pool[name][place] = state
    for row, chunk in enumerate(chunks):
        _write(pool, chunk.save_to, cache.states, row)
    return output


def _extend(run: Run, pool: States, chunk: StateChunk, states: States, hidden_states: torch.Tensor) -> torch.Tensor:
    """Computes the next tokens of one sequence, (1, num_tokens, hidden_size), up to the snapshot and behind it."""
    cache = _Cache(states)
    end = hidden_states.shape[1] if chunk.save_to is None else chunk.save_at
    outputs = [run(hidden_states[:, :end], cache)]
    _write(pool, chunk.save_to, cache.states, 0)
    if end < hidden_states.shape[1]:
        outputs.append(run(hidden_states[:, end:], cache))
    _write(pool, chunk.target, cache.states, 0)
    return torch.cat(outputs, dim=1)


def _copies(pool: States, slots: Slots) -> States:
    """Returns copies of the states in these slots; none for the first chunk of a sequence."""
    return {} if None in slots else {name: states[torch.tensor(slots)] for name, states in pool.items()}


def _at(pool: States, place: slice | torch.Tensor) -> States:
    """Returns the states in these slots, which a layer may change. For a slice they are the slots themselves."""
    return {name: states[place] for name, states in pool.items()}


def _place(slots: Slots) -> slice | torch.Tensor:
    """Returns a slice of slots that are side by side, else their indices."""
    first = slots[0] or 0
    is_row = slots == list(range(first, first + len(slots)))
    return slice(first, first + len(slots)) if is_row else torch.tensor(slots)


def _write(pool: States, slot: int | None, states: States, row: int) -> None:
    for name, state in states.items() if slot is not None else ():
        pool[name][slot] = state[row]


class _Cache:
    """What a layer takes for transformers' cache: the states of one call, see `LinearAttentionLayer` there."""

    def __init__(self, states: States) -> None:
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
