"""Recurrent states: of linear attention, Mamba and short convolutions, in place of a layer's KV cache or beside it.

transformers' layer computes; it finds here what it expects of transformers' cache. A state lies in a slot. A running
sequence has a slot of its own, and snapshots at block bounds of earlier sequences have further ones, see
`BlockManager`. All chunks of a step read their states before any chunk writes one."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, product, takewhile
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from raylens.cpu_kernels.library import KernelLibrary
from raylens.llm.layer_types import STATE, layer_types
from raylens.llm.states.slot_states import SlotStates, waves_of
from raylens.llm.states.state_functions import takes_slots
from raylens.llm.step_input import StateChunk, StepInput

States = dict[str, torch.Tensor]
"""A layer's states by name, each (number of sequences, ...)."""
Rows = Sequence[torch.Tensor]
"""A mixer's inputs, each with a row for every token: hidden states, and for some mixers token ids or others."""
Run = Callable[[Rows, "_Cache"], torch.Tensor]
Decode = Callable[[Run, dict[str, SlotStates], Rows], torch.Tensor]


def find_mixers(decoder: nn.Module, text_config: PreTrainedConfig) -> list[nn.Module]:
    """Returns the modules with a state: one for each layer that has no KV cache, and those beside a layer's attention.
    Raises ValueError for a layer without."""
    beside = [
        module for name, module in decoder.named_modules() if name.endswith(".ple") or hasattr(module, "conv_idx")
    ]
    inner = {module for one in beside for module in one.modules()}
    indices = [index for index, kind in enumerate(layer_types(text_config)) if kind in STATE]
    found: dict[int, nn.Module] = {}
    for module in decoder.modules():  # outer modules come first
        if module not in inner and (index := getattr(module, "layer_idx", None)) in indices:
            found[index] = module
    if len(found) < len(indices):
        raise ValueError(f"text models of type {type(decoder).__name__} are not supported: some layers have no state")
    return [*(found[index] for index in indices), *beside]


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
            signature = inspect.signature(mixer.forward)
            cache_name = next(one for one in ("cache_params", "past_key_values") if one in signature.parameters)
            run = partial(_run, mixer.forward, cache_name)
            mixer.forward = partial(self._forward, layer, run, decode, partial(_rows, signature, cache_name))

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
    def _forward(
        self, layer: int, run: Run, decode: Decode, rows_of: Callable[..., Rows], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Takes and returns (1, num_tokens, hidden_size)."""
        step, pool, rows = self._step, self._pools[layer], rows_of(*args, **kwargs)
        if step is None:  # the first forward, which shows the shapes
            return run(rows, _Cache(self._shapes[layer]))
        before = [_copies(pool, step.chunks[index].source) for index in step.others]
        output = torch.empty_like(rows[0])
        if decoding := step.decoding:
            slots = {name: SlotStates(states, step.waves) for name, states in pool.items()}
            output[0, decoding] = decode(run, slots, [one[0, decoding, None] for one in rows])[:, 0]
            for states, chunk in product(pool.values(), step.saving):
                states[chunk.save_to] = states[chunk.target]
        for index, states_before in zip(step.others, before, strict=True):
            place = slice(step.starts[index], step.starts[index + 1])
            own = [one[:, place] for one in rows]
            output[:, place] = _extend(run, pool, step.chunks[index], states_before, own)
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


def _rows(signature: inspect.Signature, cache_name: str, *args: Any, **kwargs: Any) -> Rows:
    """Returns the arguments of a mixer before its cache."""
    given = signature.bind(*args, **kwargs).arguments
    return [given[name] for name in takewhile(cache_name.__ne__, signature.parameters)]


def _run(forward: Callable[..., torch.Tensor], cache_name: str, rows: Rows, cache: "_Cache") -> torch.Tensor:
    return forward(*rows, **{cache_name: cache})


def _decode(run: Run, slots: dict[str, SlotStates], rows: Rows) -> torch.Tensor:
    """Computes a token of each row, (num_rows, 1, hidden_size), by a layer that takes slots."""
    return run(rows, _Cache(slots))


def _decode_by_wave(run: Run, slots: dict[str, SlotStates], rows: Rows) -> torch.Tensor:
    """Computes a token of each row by any layer, which reads its weights for each wave."""
    outputs = []
    for wave in next(iter(slots.values())).waves:
        cache = _Cache({name: states.read(wave) for name, states in slots.items()})
        outputs.append(run([one[wave.rows] for one in rows], cache))
        for name, states in slots.items():
            states.write(wave, cache.states[name])
    return torch.cat(outputs)


def _extend(run: Run, pool: States, chunk: StateChunk, states: States, rows: Rows) -> torch.Tensor:
    """Computes the next tokens of one sequence, (1, num_tokens, hidden_size), up to the snapshot and behind it."""
    cache = _Cache(states)
    end = rows[0].shape[1] if chunk.save_to is None else chunk.save_at
    outputs = [run([one[:, :end] for one in rows], cache)]
    _write(pool, chunk.save_to, cache.states)
    if end < rows[0].shape[1]:
        outputs.append(run([one[:, end:] for one in rows], cache))
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
