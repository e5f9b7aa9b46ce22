"""Cross attention: keys and values of cross states, such as a picture's features.

transformers' modules compute both. They run once over a sequence's states, whose keys and values then lie in blocks of
their own. In each step the modules get stand-ins for the states, and attend to these blocks."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import EncoderDecoderCache, PreTrainedModel

from raylens.llm.attention import LayerShape, block_bytes
from raylens.llm.host_values import send
from raylens.llm.layer_probe import run_one_token
from raylens.llm.models.family import CrossFamily, embed_tokens
from raylens.llm.prefill_chunks import read_slots, write_slots
from raylens.llm.states.recurrent_states import number_attention_layers
from raylens.llm.step_input import CrossChunk, StepInput, slots_of


@dataclass(slots=True)
class _Pool:
    """A module's cache, keys (num_blocks, block_size, kv_heads, key_dim) and values alike."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive tokens of a step that attend to the states in `slots`: a slice, if they are consecutive."""

    rows: slice
    slots: slice | torch.Tensor


@dataclass(slots=True)
class _Now:
    """What the modules do in the current forward: write to the slots `target`, or attend as `rows`."""

    rows: list[_Rows] = field(default_factory=list)
    target: torch.Tensor | None = None


class CrossStates:
    """The cross states in all modules that attend to them. `allocate` makes their pools."""

    def __init__(self, model: PreTrainedModel, cross: CrossFamily, decoder: nn.Module) -> None:
        self._model, self._cross, self._decoder = model, cross, decoder
        self._hidden_size: int = model.config.get_text_config().hidden_size
        modules = [one for name, one in decoder.named_modules() if name.rpartition(".")[2] == cross.attention]
        self._pools: dict[nn.Module, _Pool] = {}
        self._shapes: dict[nn.Module, LayerShape] = {}
        self._now = _Now()
        self._block_size = 1
        for module in modules:
            module.cross_states = self
        self.num_attention_layers = number_attention_layers(decoder, without=modules)
        """The number of layers with a KV cache, which are numbered as if there were no others."""
        if cross.encoder is not None:
            _attend_plainly(model.get_submodule(cross.encoder))
        if cross.positions is not None:
            _count_positions_of_step(decoder, cross.positions)

    def bytes_of_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a block in all modules, known after a first forward."""
        return block_bytes(list(self._shapes.values()), block_size=block_size, dtype=dtype)

    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        device = self._model.device
        self._block_size = block_size
        for module, shape in self._shapes.items():
            sizes = [(num_blocks, block_size, shape.num_kv_heads, dim) for dim in (shape.key_dim, shape.value_dim)]
            self._pools[module] = _Pool(*(torch.zeros(size, dtype=dtype, device=device) for size in sizes))

    @contextmanager
    def of(self, step: StepInput) -> Iterator[dict[str, Any]]:
        """Computes the states of sequences that start in this step. Yields the decoder's inputs, by which it attends
        to the states of all of them."""
        for chunk in step.cross:
            if chunk.source is not None and chunk.source.num_states:
                self._write(chunk)
        self._now = _Now(rows=self._rows(step.cross))
        is_own = np.zeros(len(step.token_ids), dtype=bool)
        views = [(number, view) for chunk in step.cross for number, view in chunk.views]
        if views:
            is_own = np.repeat([view.is_own for _, view in views], [number for number, _ in views])
        try:
            yield {
                self._cross.states: self._stand_in(),
                "past_key_values": _FilledCache(self.num_attention_layers + len(self._shapes)),
                **self._cross.inputs_of_rows(send(is_own.astype(np.float32), self._model.device).to(self._model.dtype)),
            }
        finally:
            self._now = _Now()

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Takes `query` (1, heads, num_tokens, key_dim), and the states' keys and values (1, kv_heads, num_states,
        dim). Returns (1, num_tokens, heads, value_dim), 0 for tokens without states."""
        now, pool = self._now, self._pools.get(module)
        if now.target is not None and pool is not None:
            write_slots(pool.keys, now.target, key[0].transpose(0, 1))
            write_slots(pool.values, now.target, value[0].transpose(0, 1))
        shape = self._shapes.setdefault(module, LayerShape(key.shape[1], key.shape[-1], value.shape[-1], None))
        output = query.new_zeros(1, query.shape[2], query.shape[1], shape.value_dim)
        for one in now.rows:
            assert pool is not None, "steps come after `allocate`"
            own_keys, own_values = (_read(cache, one.slots).to(query.dtype) for cache in (pool.keys, pool.values))
            attended = nn.functional.scaled_dot_product_attention(
                query[:, :, one.rows],
                own_keys.transpose(0, 1).unsqueeze(0),
                own_values.transpose(0, 1).unsqueeze(0),
                scale=scaling,
                enable_gqa=True,
            )
            output[:, one.rows] = attended.transpose(1, 2)
        return output

    def probe_inputs(self) -> dict[str, Any]:
        """Returns the decoder's inputs for a single token without states, which shows the modules' shapes."""
        is_own = torch.zeros(1, dtype=self._model.dtype, device=self._model.device)
        return {self._cross.states: self._stand_in(), **self._cross.inputs_of_rows(is_own)}

    def _stand_in(self) -> torch.Tensor:
        return torch.zeros(1, 1, self._hidden_size, dtype=self._model.dtype, device=self._model.device)

    def _write(self, chunk: CrossChunk) -> None:
        """Computes and stores keys and values of a sequence's states: the decoder runs over a single token, whose
        result has no use, beside them."""
        assert chunk.source is not None
        slots = slots_of(chunk.table, 0, chunk.source.num_states, self._block_size)
        self._now = _Now(target=send(slots, self._model.device))
        inputs = {**self.probe_inputs(), self._cross.states: self._states(chunk)}
        run_one_token(self._decoder, self._hidden_size, inputs)

    def _states(self, chunk: CrossChunk) -> torch.Tensor:
        """Returns the states (1, num_states, hidden_size)."""
        source, model = chunk.source, self._model
        assert source is not None
        if self._cross.encoder is None:
            embeds = torch.empty(source.num_states, self._hidden_size, dtype=model.dtype, device=model.device)
        else:
            token_ids = np.array(source.token_ids)
            for positions in source.positions:
                token_ids[list(positions)] = 0  # a placeholder may lie outside the vocabulary
            embeds = embed_tokens(model, send(token_ids, model.device))
        for positions, own in zip(source.positions, chunk.embeds, strict=True):
            embeds[send(np.array(positions), model.device)] = own.to(embeds)
        states = embeds.unsqueeze(0)
        if self._cross.encoder is not None:
            states = model.get_submodule(self._cross.encoder)(inputs_embeds=states).last_hidden_state
        return states

    def _rows(self, chunks: Sequence[CrossChunk]) -> list[_Rows]:
        found = []
        views = [(chunk.table, number, view) for chunk in chunks for number, view in chunk.views]
        starts = accumulate((number for _, number, _ in views), initial=0)
        for start, (table, number, view) in zip(starts, views, strict=False):
            if view.start < view.end:
                slots = slots_of(table, view.start, view.end, self._block_size)
                is_run = slots[-1] - slots[0] == len(slots) - 1
                own = slice(int(slots[0]), int(slots[-1]) + 1) if is_run else send(slots, self._model.device)
                found.append(_Rows(slice(start, start + number), own))
        return found


class _FilledCache(EncoderDecoderCache):
    """Stands in for a cache that holds all states already. Keys and values of tokens pass through."""

    def __init__(self, num_layers: int) -> None:
        self.self_attention_cache = self.cross_attention_cache = _PassingCache(num_layers)
        self.layers = self.self_attention_cache.layers
        self.is_updated = dict.fromkeys(range(num_layers), True)
        self.update = self.self_attention_cache.update


class _PassingCache:
    def __init__(self, num_layers: int) -> None:
        self.layers = [_FilledLayer()] * num_layers
        self.is_sliding = self.is_linear = self.is_dummy = [False] * num_layers

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _FilledLayer:
    """A layer of such a cache. Nothing reads its keys and values."""

    keys = values = torch.zeros(1, 1, 1, 1)
    is_initialized = True


def _attend_plainly(encoder: nn.Module) -> None:
    """Gives the text encoder PyTorch's attention. Its modules share their configuration with the decoder."""
    config: Any = copy.copy(encoder.config)
    config._attn_implementation = "sdpa"
    for module in encoder.modules():
        if hasattr(module, "config"):
            module.config = config


def _count_positions_of_step(decoder: nn.Module, name: str) -> None:
    """Makes a decoder that takes no `position_ids` look up the embeddings of these positions."""
    embedding: Any = getattr(decoder, name)
    own, given = embedding.forward, {}

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given["position_ids"] = kwargs["position_ids"][0]

    def look_up(*args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = own(*args, **{**kwargs, **given})
        return found

    decoder.register_forward_pre_hook(note, with_kwargs=True)
    embedding.forward = look_up


def _read(cache: torch.Tensor, slots: slice | torch.Tensor) -> torch.Tensor:
    return cache.flatten(0, 1)[slots] if isinstance(slots, slice) else read_slots(cache, slots)
