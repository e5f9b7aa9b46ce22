"""Attention of a step's prefill chunks on a GPU, over contiguous copies of their keys and values.

One call computes several chunks if PyTorch has a kernel for it; otherwise each chunk takes a call.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raylens.llm.attention import AttentionCall
from raylens.llm.cache_slots import read_slots
from raylens.llm.chunk_attention import attend_chunk
from raylens.llm.host_values import send
from raylens.llm.step_input import StepInput, slots_of
from raylens.modeling.varlen_attention import attend_causally, has_kernel

Masks = Mapping[int | None, torch.Tensor | None]
"""A chunk's masks by its layers' windows, see `llm/attention_masks.py`."""


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
        """Attends over `keys` and `values`, the layer's caches, (num_blocks, block_size, kv_heads, dim). Returns
        (num_tokens of these chunks, heads, value_dim)."""
        queries = call.queries[self.rows]
        own_keys, own_values = (read_slots(cache, self.slots).to(queries.dtype) for cache in (keys, values))
        masks = [of_windows[call.window] for of_windows in self.masks]
        if _goes_in_one_call(call, masks):
            longest = max(self.query_lengths), max(self.context_lengths)
            return attend_causally(
                queries, own_keys, own_values, starts=self.starts, longest=longest, scaling=call.scaling
            )
        chunks = zip(
            torch.split(queries, self.query_lengths),
            torch.split(own_keys, self.context_lengths),
            torch.split(own_values, self.context_lengths),
            masks,
            strict=True,
        )
        return torch.cat(
            [
                attend_chunk(call, chunk, chunk_keys.transpose(0, 1), chunk_values.transpose(0, 1), mask)
                for chunk, chunk_keys, chunk_values, mask in chunks
            ]
        )


def _goes_in_one_call(call: AttentionCall, masks: Sequence[torch.Tensor | None]) -> bool:
    """Returns whether `attend_causally` can replace `attend_chunk` for all chunks."""
    is_plain = call.softcap is None and all(mask is None for mask in masks)
    return is_plain and call.queries.shape[-1] == call.values.shape[-1] and has_kernel(call.queries)


def prefill_chunks(
    step: StepInput, masks: Sequence[Masks], *, block_size: int, max_positions: int, device: torch.device
) -> list[PrefillChunks]:
    """Returns all prefill chunks of the step in groups, with their tensors on `device`. `masks`: of each chunk.

    The contexts of a group have at most `max_positions` positions together, which bounds the copies of keys and values.
    A longer chunk is a group of its own."""
    made, row = [], step.num_decodes
    for members in _groups(step, max_positions):
        queries = [step.query_lengths[index] for index in members]
        ends = [step.context_lengths[index] for index in members]
        slots = [
            slots_of(step.block_tables[index], 0, end, block_size) for index, end in zip(members, ends, strict=True)
        ]
        starts = np.zeros((2, len(members) + 1), dtype=np.int32)
        starts[:, 1:] = np.cumsum([queries, ends], axis=1)
        rows = slice(row, row + sum(queries))
        made.append(
            PrefillChunks(
                rows,
                queries,
                ends,
                send(np.concatenate(slots), device),
                send(starts, device),
                [masks[index - step.num_decodes] for index in members],
            )
        )
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
