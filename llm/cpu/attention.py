"""Attention on the CPU by PyTorch's matrix products, for the cases that `kernel_attention` does not support.

The cache is mostly read in place: a sequence's blocks are mostly consecutive, see `BlockManager`, so its positions form
a few long stretches. Keys and values of a head are contiguous over positions, so a stretch is a matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from raylens.llm.attention import AttentionCall, LayerShape
from raylens.llm.attention_variants.chosen_positions import ChosenPositions
from raylens.llm.chunk_attention import attend_chunk, capped, chunk_masks
from raylens.llm.step_input import StepInput

MAX_STRETCHES = 8
"""A sequence of more is copied first: each stretch costs two matrix products."""

# By the queries' dtype: the summand of `baddbmm`, which beta=0 ignores.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_UNREAD = {dtype: torch.empty(1, dtype=dtype) for dtype in _DTYPES}

Stretches = Sequence[slice] | torch.Tensor
"""The slots of positions in the cache, in order: ranges of slots, or a tensor with one slot a position."""


class CpuAttention:
    """The KV cache and the attention over it. Each layer has keys and values, (kv_heads, num_slots, dim)."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        windows_cut_spans: bool,
        spans_need_window: bool = False,
    ) -> None:
        num_slots = num_blocks * block_size
        self._keys = [torch.zeros(layer.num_kv_heads, num_slots, layer.key_dim, dtype=dtype) for layer in layers]
        self._values = [torch.zeros(layer.num_kv_heads, num_slots, layer.value_dim, dtype=dtype) for layer in layers]
        self._windows = {layer.window for layer in layers}
        self._block_size = block_size
        self._masks = partial(
            chunk_masks,
            windows=self._windows,
            windows_cut_spans=windows_cut_spans,
            spans_need_window=spans_need_window,
            device=torch.device("cpu"),
        )

    def prepare(self, step: StepInput) -> "CpuStep":
        """Returns the step's attention, which all layers share."""
        num_decodes = step.num_decodes
        contexts = list(zip(step.block_tables, step.context_lengths, strict=True))[:num_decodes]
        decodes = {
            window: [
                _stretches(blocks, 0 if window is None else max(0, end - window), end, self._block_size)
                for blocks, end in contexts
            ]
            for window in self._windows
        }
        prefills = [self._prefill(step, index) for index in range(num_decodes, len(step.query_lengths))]
        return CpuStep(self._keys, self._values, step.slot_mapping, decodes, prefills)

    def _prefill(self, step: StepInput, index: int) -> "Prefill":
        masks = self._masks(step, index)
        row = sum(step.query_lengths[:index])
        stretches = _stretches(step.block_tables[index], 0, step.context_lengths[index], self._block_size)
        return Prefill(slice(row, row + step.query_lengths[index]), stretches, masks)


@dataclass(frozen=True, slots=True)
class Prefill:
    """A chunk's rows of the flattened tokens, the slots of all positions up to its end, and its masks by window."""

    rows: slice
    stretches: Stretches
    masks: Mapping[int | None, torch.Tensor | None]


def _stretches(blocks: list[int], start: int, end: int, size: int) -> Stretches:
    """Returns the slots of the positions [start, end) of a sequence on `blocks` of `size` slots."""
    first, last = start // size, (end - 1) // size
    begin = blocks[first] * size + start % size
    if blocks[first : last + 1] == list(range(blocks[first], blocks[first] + last + 1 - first)):
        return [slice(begin, begin + end - start)]  # the usual case, faster than the loop below
    stretches: list[slice] = []
    for index in range(first, last):
        if blocks[index + 1] != blocks[index] + 1:
            stretches.append(slice(begin, (blocks[index] + 1) * size))
            begin = blocks[index + 1] * size
    stretches.append(slice(begin, blocks[last] * size + (end - 1) % size + 1))
    if len(stretches) <= MAX_STRETCHES:
        return stretches
    return torch.cat([torch.arange(stretch.start, stretch.stop) for stretch in stretches])


@dataclass(slots=True)
class CpuStep:
    """One step's `AttentionBackend`. `decodes`: by window, the slots that each decoding sequence sees."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    slot_mapping: torch.Tensor
    decodes: Mapping[int | None, list[Stretches]]
    prefills: list[Prefill]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes the new keys and values into the cache, then attends over it."""
        keys, values = self.keys[call.layer], self.values[call.layer]
        _write(keys, self.slot_mapping, call.keys)
        _write(values, self.slot_mapping, call.values)
        output = call.queries.new_empty(*call.queries.shape[:-1], call.values.shape[-1])
        decodes = self.decodes[call.window]
        queries, results = (_groups(rows, len(decodes), keys) for rows in (call.queries, output))
        for query, result, stretches in zip(queries, results, decodes, strict=True):
            _decode(call, query, keys, values, stretches, result)
        for chunk in self.prefills:
            parts = (_read(cache, chunk.stretches, call.queries.dtype) for cache in (keys, values))
            own_keys, own_values = (part[0] if len(part) == 1 else torch.cat(part, dim=1) for part in parts)
            masks = chunk.masks[call.window]
            output[chunk.rows] = attend_chunk(call, call.queries[chunk.rows], own_keys, own_values, masks)
        return output

    def attend_chosen(self, call: AttentionCall, chosen: Sequence[ChosenPositions]) -> torch.Tensor:
        """Does as `attend`, over the chosen positions of each chunk."""
        keys, values = self.keys[call.layer], self.values[call.layer]
        _write(keys, self.slot_mapping, call.keys)
        _write(values, self.slot_mapping, call.values)
        output = call.queries.new_empty(*call.queries.shape[:-1], call.values.shape[-1])
        for chunk in chosen:
            slots, mask = chunk.slots, chunk.mask
            if mask.shape[:-1] == (1,):  # reads only what a single token sees
                slots, mask = slots[mask[0]], mask[:, mask[0]]
            (own_keys,), (own_values,) = (_read(cache, slots, call.queries.dtype) for cache in (keys, values))
            if call.sinks is not None:  # a further position of zeros
                own_keys, own_values = (nn.functional.pad(own, (0, 0, 0, 1)) for own in (own_keys, own_values))
                mask = torch.cat([mask, call.sinks[:, chunk.rows]], dim=-1)
            output[chunk.rows] = attend_chunk(call, call.queries[chunk.rows], own_keys, own_values, mask)
        return output

    def extend_index(self, layer: int, rows: slice, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Stores the index keys of the step's tokens `rows`, (num_tokens, dim). Returns those at `slots`."""
        _write(self.keys[layer], self.slot_mapping[rows], keys.unsqueeze(1))
        return _read(self.keys[layer], slots, keys.dtype)[0][0]


def _write(cache: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Writes `new`, (num_tokens, kv_heads, dim), to the slots of the cache."""
    new = new.transpose(0, 1).to(cache.dtype)
    if cache.itemsize == 1:  # PyTorch's index_copy_ does not support float8
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    cache.index_copy_(1, slots, new)


def _read(cache: torch.Tensor, stretches: Stretches, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the stretches of the cache in `dtype`, each (kv_heads, num_positions, dim)."""
    places = [stretches] if isinstance(stretches, torch.Tensor) else stretches
    parts = [cache[:, place] for place in places]
    return parts if cache.dtype is dtype else [part.to(dtype) for part in parts]


def _groups(rows: torch.Tensor, num_rows: int, keys: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the first `num_rows` of `rows` (num_tokens, heads, dim), each as (kv_heads, heads that share a key head,
    dim)."""
    _, heads, dim = rows.shape
    return rows[:num_rows].view(num_rows, len(keys), heads // len(keys), dim).unbind()


def _decode(
    call: AttentionCall,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    stretches: Stretches,
    result: torch.Tensor,
) -> None:
    """Attends with one token's `queries` (kv_heads, group, key_dim) and fills `result` (kv_heads, group, value_dim)."""
    parts = _read(keys, stretches, queries.dtype)
    if call.softcap is None:  # one call computes product and scaling
        unread = _UNREAD[queries.dtype]
        scores = [torch.baddbmm(unread, queries, part.mT, beta=0, alpha=call.scaling) for part in parts]
    else:
        scores = [capped(torch.bmm(queries, part.mT), call.scaling, call.softcap) for part in parts]
    whole = scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)
    weights = whole.softmax(dim=-1)
    if weights.dtype is not queries.dtype:  # even a call of `to` that does nothing takes time
        weights = weights.to(queries.dtype)
    parts = _read(values, stretches, queries.dtype)
    if len(parts) == 1:
        torch.bmm(weights, parts[0], out=result)
        return
    sizes = [part.shape[1] for part in parts]
    products = [torch.bmm(own, part) for own, part in zip(torch.split(weights, sizes, dim=-1), parts, strict=True)]
    torch.sum(torch.stack(products), dim=0, out=result)
