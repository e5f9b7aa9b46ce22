"""Attention on the CPU by Raylens' own kernels (`cpu_kernels`), in float32: one call a layer and step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from raylens.cpu_kernels.attention import NO_SPAN, LayerCache, StepChunks, attend, padded_dim
from raylens.cpu_kernels.library import KernelLibrary
from raylens.llm.attention import AttentionCall, LayerShape
from raylens.llm.step_input import StepInput


def padded_shape(library: KernelLibrary, layer: LayerShape) -> LayerShape:
    """Returns the layer's shape with the padded row sizes of the cache."""
    key_dim, value_dim = (padded_dim(library, dim) for dim in (layer.key_dim, layer.value_dim))
    return replace(layer, key_dim=key_dim, value_dim=value_dim)


class KernelAttention:
    """A float32 KV cache on the CPU and the attention over it."""

    def __init__(
        self,
        library: KernelLibrary,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        windows_cut_spans: bool,
        spans_need_window: bool = False,
    ) -> None:
        assert dtype is torch.float32, dtype
        self.library = library
        self.num_slots = num_blocks * block_size
        self.caches = [
            LayerCache(library, layer.num_kv_heads, self.num_slots, block_size, layer.key_dim, layer.value_dim)
            for layer in layers
        ]
        self._windows_cut_spans = windows_cut_spans
        self._spans_need_window = spans_need_window

    def populate(self) -> None:
        """Makes the cache's memory available before steps need it. Thread-safe."""
        for cache in self.caches:
            cache.pages.populate()

    def prepare(self, step: StepInput) -> "KernelStep":
        """Returns the step's attention, which all layers share."""
        spans: dict[int, list[int]] = {}
        for chunk, span, position in step.span_members:
            if chunk not in spans:
                spans[chunk] = [NO_SPAN] * step.context_lengths[chunk]
            spans[chunk][position] = span
        lengths = (step.query_lengths, step.context_lengths, step.prompt_lengths)
        make = partial(StepChunks, step.slot_mapping, step.block_tables, *lengths)
        chunks = make(spans=spans, windows_cut_spans=self._windows_cut_spans)
        without_spans = make() if spans and self._spans_need_window else chunks
        return KernelStep(self.library, self.caches, chunks, without_spans)


@dataclass(frozen=True, slots=True)
class KernelStep:
    """One step's `AttentionBackend`. `without_window`: the chunks for layers without a window."""

    library: KernelLibrary
    caches: list[LayerCache]
    chunks: StepChunks
    without_window: StepChunks

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes the new keys and values into the cache, then attends over it."""
        cache, rows = self.caches[call.layer], (call.queries, call.keys, call.values)
        numbers = (call.scaling, call.softcap, call.window)
        chunks = self.without_window if call.window is None else self.chunks
        return attend(self.library, chunks, cache, *rows, *numbers, row_parts=call.row_parts)
