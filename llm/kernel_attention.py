"""Attention on the CPU by Raylens' own kernels (`cpu_kernels`), in float32: one call a layer for all chunks of a step.

Chunks with bidirectional spans need masks. They go through PyTorch, as in `cpu_attention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cpu_kernels.attention import LayerCache, StepChunks, attend, padded_dim
from cpu_kernels.library import KernelLibrary
from llm.attention import AttentionCall, LayerShape
from llm.cpu_attention import Prefill, attend_prefill, prefill_of
from llm.step_input import StepInput


def padded_shape(library: KernelLibrary, layer: LayerShape) -> LayerShape:
    """Returns the shape with the sizes that rows of the cache have in memory."""
    key_dim, value_dim = (padded_dim(library, dim) for dim in (layer.key_dim, layer.value_dim))
    return replace(layer, key_dim=key_dim, value_dim=value_dim)


class KernelAttention:
    """The KV cache of float32 on the CPU and the attention over it."""

    def __init__(
        self,
        library: KernelLibrary,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        windows_cut_spans: bool,
    ) -> None:
        assert dtype is torch.float32, dtype
        self.library = library
        self.num_slots = num_blocks * block_size
        self.caches = [
            LayerCache(
                library,
                kv_heads=layer.num_kv_heads,
                num_slots=self.num_slots,
                block_size=block_size,
                key_dim=layer.key_dim,
                value_dim=layer.value_dim,
            )
            for layer in layers
        ]
        self._windows = {layer.window for layer in layers}
        self._block_size = block_size
        self._windows_cut_spans = windows_cut_spans

    def prepare(self, step: StepInput) -> "KernelStep":
        """Returns what all layers share in attending to the step's tokens."""
        num_decodes = step.num_decodes
        with_spans = sorted({chunk for chunk, _, _ in step.span_members if chunk >= num_decodes})
        chunks = StepChunks(
            step.slot_mapping,
            step.block_tables,
            step.query_lengths,
            step.context_lengths,
            num_decodes=num_decodes,
            skipped=with_spans,
        )
        prefills = [
            prefill_of(step, index, self._windows, self._block_size, windows_cut_spans=self._windows_cut_spans)
            for index in with_spans
        ]
        return KernelStep(self.library, self.caches, chunks, prefills)


@dataclass(frozen=True, slots=True)
class KernelStep:
    """One step's `AttentionBackend`. `masked`: the chunks with spans."""

    library: KernelLibrary
    caches: list[LayerCache]
    chunks: StepChunks
    masked: list[Prefill]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes the new keys and values into the cache, then attends over it."""
        cache = self.caches[call.layer]
        output = attend(
            self.library,
            self.chunks,
            cache,
            call.queries,
            call.keys,
            call.values,
            scaling=call.scaling,
            softcap=call.softcap,
            window=call.window,
        )
        for chunk in self.masked:
            output[chunk.rows] = attend_prefill(call, chunk, cache.keys, cache.values)
        return output
