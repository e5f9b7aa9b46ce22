"""Attention of a step's prefill chunks on a GPU, over contiguous copies of their keys and values. One call computes
several chunks if PyTorch has a kernel for it. A layer's cache is (num_blocks, block_size, kv_heads, dim)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raylens.llm.attention import AttentionCall
from raylens.llm.chunk_attention import attend_chunk
from raylens.llm.host_values import send
from raylens.llm.step_input import StepInput, slots_of
from raylens.modeling.varlen_attention import attend_causally, has_kernel

Masks = Mapping[int | None, torch.Tensor | None]
"""A chunk's masks by its layers' windows, see `chunk_masks`."""


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """Some chunks of a step, at `rows` of its flattened tokens.

    `query_lengths` and `context_lengths`: the number of tokens of each chunk, and of positions up to its end.
    `slots`: the cache slots of these positions, concatenated over the chunks, int64.
    `starts`: (2, num_chunks + 1), int32: the cumulative query lengths and context lengths, from 0."""

    rows: slice
    query_lengths: list[int]
    context_lengths: list[int]
    slots: torch.Tensor
    starts: torch.Tensor
    masks: Sequence[Masks]

    def attend(self, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attends over the layer's caches `keys` and `values`. Returns (num_tokens, heads, value_dim)."""
        queries = call.queries[self.rows]
        own_keys, own_values = (read_slots(cache, self.slots).to(queries.dtype) for cache in (keys, values))
        masks = [of_windows[call.window] for of_windows in self.masks]
        is_plain = call.softcap is None and all(mask is None for mask in masks)
        if is_plain and queries.shape[-1] == own_values.shape[-1] and has_kernel(queries):
            longest = max(self.query_lengths), max(self.context_lengths)
            return attend_causally(
                queries, own_keys, own_values, starts=self.starts, longest=longest, scaling=call.scaling
            )
        # The chunks' queries (num_queries, heads, dim), keys and values (kv_heads, num_positions, dim).
        chunks = zip(
            torch.split(queries, self.query_lengths),
            torch.split(own_keys.transpose(0, 1), self.context_lengths, dim=1),
            torch.split(own_values.transpose(0, 1), self.context_lengths, dim=1),
            masks,
            strict=True,
        )
        return torch.cat([attend_chunk(call, *chunk) for chunk in chunks])


def prefill_chunks(
    step: StepInput, masks: Sequence[Masks], *, block_size: int, max_positions: int, device: torch.device
) -> list[PrefillChunks]:
    """Returns all prefill chunks of the step in groups, with their tensors on `device`. `masks`: of each chunk. The
    contexts of a group have at most `max_positions` positions together, or are of a single chunk, which bounds the
    copies."""
    made, row = [], step.num_decodes
    for members in _groups(step, max_positions):
        queries = [step.query_lengths[index] for index in members]
        ends = [step.context_lengths[index] for index in members]
        slots = [slots_of(step.block_tables[index], 0, step.context_lengths[index], block_size) for index in members]
        starts = np.zeros((2, len(members) + 1), dtype=np.int32)
        starts[:, 1:] = np.cumsum([queries, ends], axis=1)
        rows = slice(row, row + sum(queries))
        own_slots, own_masks = send(np.concatenate(slots), device), [masks[at - step.num_decodes] for at in members]
        made.append(PrefillChunks(rows, queries, ends, own_slots, send(starts, device), own_masks))
        row = rows.stop
    return made


def _groups(step: StepInput, max_positions: int) -> Iterator[list[int]]:
    """Yields the indices of the prefill chunks of each group, in order."""
    group: list[int] = []
    num_positions = 0
    for index in range(step.num_decodes, len(step.query_lengths)):
        end = step.context_lengths[index]
        if group and num_positions + end > max_positions:
            yield group
            group, num_positions = [], 0
        group.append(index)
        num_positions += end
    if group:
        yield group


def write_slots(cache: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Writes `new`, (num_tokens, kv_heads, dim), to the slots of the cache."""
    _movable(cache).flatten(0, 1).index_copy_(0, slots, _movable(new.to(cache.dtype)))


def read_slots(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns the content of the slots, (num_slots, kv_heads, dim), in the cache's dtype."""
    return _movable(cache).flatten(0, 1)[slots].view(cache.dtype)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, with a float8 viewed as bytes, because PyTorch's indexing does not support float8."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
