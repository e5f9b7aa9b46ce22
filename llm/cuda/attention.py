"""Attention on a GPU: decoding reads the cache block by block; a prefill chunk reads a contiguous copy of its
context."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from raylens.llm.attention import AttentionCall, LayerShape
from raylens.llm.chunk_attention import chunk_masks
from raylens.llm.cuda.decode_kernels import PagedContexts, count_splits, paged_decode
from raylens.llm.host_values import send
from raylens.llm.prefill_chunks import PrefillChunks, prefill_chunks, write_slots
from raylens.llm.step_input import StepInput


class CudaAttention:
    """The KV cache on a GPU and the attention over it. Each layer has keys and values, (num_blocks + 1, block_size,
    kv_heads, dim). The last block belongs to no sequence; the padding rows of a CUDA graph's batch write to it."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        windows_cut_spans: bool,
        spans_need_window: bool = False,
        max_positions: int,
        device: torch.device,
    ) -> None:
        """`max_positions`: the longest context of a sequence. Chunks are batched up to this total."""
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        shapes = [(num_blocks + 1, block_size, layer.num_kv_heads) for layer in layers]
        self._keys = [zeros(*shape, layer.key_dim) for shape, layer in zip(shapes, layers, strict=True)]
        self._values = [zeros(*shape, layer.value_dim) for shape, layer in zip(shapes, layers, strict=True)]
        self._windows = {layer.window for layer in layers}
        self.block_size = block_size
        self.padding_block = num_blocks
        self._masks = partial(
            chunk_masks,
            windows=self._windows,
            windows_cut_spans=windows_cut_spans,
            spans_need_window=spans_need_window,
            device=device,
        )
        self._max_positions = max_positions
        self._device = device
        self._num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )

    def prepare(self, step: StepInput) -> "CudaStep":
        """Returns the step's attention, which all layers share."""
        num_decodes = step.num_decodes
        masks = [self._masks(step, index) for index in range(num_decodes, len(step.query_lengths))]
        prefills = prefill_chunks(
            step, masks, block_size=self.block_size, max_positions=self._max_positions, device=self._device
        )
        lengths = step.context_lengths[:num_decodes]
        contexts = self._contexts(step.block_tables[:num_decodes], lengths)
        return self.prepare_decodes(step.slot_mapping, contexts, max(lengths, default=0), prefills)

    def prepare_decodes(
        self,
        slot_mapping: torch.Tensor,
        contexts: PagedContexts,
        max_length: int,
        prefills: Sequence[PrefillChunks] = (),
    ) -> "CudaStep":
        """Returns the same as `prepare`, from tensors on the device. Each replay of a CUDA graph reads their latest
        content. `max_length` bounds the contexts' lengths for all replays."""
        return CudaStep(self._keys, self._values, slot_mapping, contexts, max_length, prefills, self._num_processors)

    def _contexts(self, block_tables: Sequence[list[int]], lengths: Sequence[int]) -> PagedContexts:
        # Lengths and tables share an array, so that one copy sends both to the device.
        rows = np.zeros((len(lengths), 1 + max(map(len, block_tables), default=0)), dtype=np.int32)
        rows[:, 0] = lengths
        for row, blocks in zip(rows, block_tables, strict=True):
            row[1 : 1 + len(blocks)] = blocks
        on_device = send(rows, self._device)
        return PagedContexts(on_device[:, 1:], on_device[:, 0])


@dataclass(frozen=True, slots=True)
class CudaStep:
    """One step's `AttentionBackend`. The decoding sequences, described by `contexts`, precede the prefill chunks."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    slot_mapping: torch.Tensor
    contexts: PagedContexts
    max_length: int
    prefills: Sequence[PrefillChunks]
    num_processors: int

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes the new keys and values into the cache, then attends over it."""
        keys, values = self.keys[call.layer], self.values[call.layer]
        write_slots(keys, self.slot_mapping, call.keys)
        write_slots(values, self.slot_mapping, call.values)
        output = call.queries.new_empty(*call.queries.shape[:-1], call.values.shape[-1])
        if num_decodes := len(self.contexts.lengths):
            paged_decode(
                call.queries[:num_decodes].contiguous(),
                keys,
                values,
                self.contexts,
                output[:num_decodes],
                scaling=call.scaling,
                softcap=call.softcap,
                window=call.window,
                num_splits=count_splits(num_decodes * keys.shape[2], self.max_length, self.num_processors),
            )
        for chunks in self.prefills:
            output[chunks.rows] = chunks.attend(call, keys, values)
        return output
