"""Attention over a paged cache in one call a layer, for all decoding sequences and chunks, and attention of pictures.

The structures mirror those of `csrc/attention.h` and `csrc/paged_cache.h`."""

import ctypes
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from raylens.cpu_kernels.huge_pages import HugePages
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.packed_weight import EXACT
from raylens.cpu_kernels.structures import Memory, RowsStructure, address_of, addresses, floats, integers
from raylens.cpu_kernels.threads import num_threads

NO_SPAN = -1
"""Mirrors `kNoSpan`: the number of a position outside of bidirectional spans."""
_NO_SPANS: Mapping[int, Sequence[int]] = MappingProxyType({})


class _LayerCache(ctypes.Structure):
    _fields_ = [
        *addresses("keys", "values"),
        *integers("kv_heads", "num_slots", "block_size", "key_dim", "value_dim"),
    ]


class _StepChunks(ctypes.Structure):
    _fields_ = [
        *addresses("slots", "blocks", "first_blocks", "lengths", "ends", "prompt_ends", "spans", "first_spans"),
        *integers("num_chunks", "num_tokens", "windows_cut_spans"),
    ]


class _AttentionArguments(ctypes.Structure):
    _fields_ = [
        *((name, RowsStructure) for name in ("queries", "keys", "values")),
        *addresses("output"),
        *integers("heads", "window", "row_parts"),
        *floats("scaling", "softcap"),
    ]

    @classmethod
    def of(
        cls,
        given: Iterable[torch.Tensor],
        scaling: float,
        softcap: float | None = None,
        window: int | None = None,
        *,
        row_parts: int,
    ) -> "tuple[_AttentionArguments, list[torch.Tensor]]":
        """`given`: queries, keys and values. Returns the arguments, and the tensors that they point to, of which the
        last is the empty output."""
        tensors = [rows if rows.stride(-1) == 1 else rows.contiguous() for rows in given]
        queries, _, values = tensors
        tensors.append(queries.new_empty(*queries.shape[:2], values.shape[2]))
        *rows, output = map(RowsStructure.of, tensors)
        return cls(*rows, output.data, queries.shape[1], window or 0, row_parts, scaling, softcap or 0.0), tensors


class _Pictures(ctypes.Structure):
    _fields_ = addresses("starts") + integers("count", "kv_heads", "key_dim", "value_dim")


def padded_dim(library: KernelLibrary, dim: int) -> int:
    """Returns the numbers of a cache row in memory: `dim`, rounded up to whole vectors."""
    return -(-dim // library.lanes) * library.lanes


class LayerCache:
    """A layer's keys and values, float32, (kv_heads, num_slots, dim) each. Zeros pad each row to whole vectors."""

    def __init__(
        self, library: KernelLibrary, kv_heads: int, num_slots: int, block_size: int, key_dim: int, value_dim: int
    ) -> None:
        shapes = [(kv_heads, num_slots, padded_dim(library, dim)) for dim in (key_dim, value_dim)]
        sizes = [math.prod(shape) * torch.float32.itemsize for shape in shapes]
        self.pages = pages = HugePages(sizes)
        rows = [pages.take(size).view(torch.float32).view(shape) for size, shape in zip(sizes, shapes, strict=True)]
        self.keys, self.values = rows[0][..., :key_dim], rows[1][..., :value_dim]
        own = _LayerCache(rows[0].data_ptr(), rows[1].data_ptr(), kv_heads, num_slots, block_size, key_dim, value_dim)
        self._own, self.address = own, ctypes.addressof(own)


class StepChunks:
    """A step's chunks in the library's form. `slots`: (num_tokens,), int64, the cache slots of the tokens.

    `block_tables`, `lengths`, `ends` and `prompt_ends` have an entry for each chunk: its sequence's blocks, its number
    of tokens, the positions up to its end, and the positions of the sequence's prompt. Prompt tokens and generated
    tokens have different orders of summation, which are the same in every step.

    `spans`: by chunk, the number of each position's bidirectional span, from the sequence's first position up to the
    chunk's end, or NO_SPAN. The positions of a span see each other. Chunks without spans may be left out.
    `windows_cut_spans`: whether a layer's window also applies within spans."""

    def __init__(
        self,
        slots: torch.Tensor,
        block_tables: Sequence[list[int]],
        lengths: Sequence[int],
        ends: Sequence[int],
        prompt_ends: Sequence[int],
        *,
        spans: Mapping[int, Sequence[int]] = _NO_SPANS,
        windows_cut_spans: bool = True,
    ) -> None:
        blocks, first_blocks = array("i"), array("i")
        for table in block_tables:
            first_blocks.append(len(blocks))
            blocks.fromlist(table)
        arrays = [blocks, first_blocks, array("i", lengths), array("i", ends), array("i", prompt_ends)]
        joined, first_spans = array("f"), array("i", [-1]) * len(lengths)
        for chunk, own_spans in spans.items():
            first_spans[chunk] = len(joined)
            joined.extend(own_spans)
        self._kept: list[Memory] = [slots, *arrays, joined, first_spans]
        own = _StepChunks(*map(address_of, self._kept), len(lengths), len(slots), windows_cut_spans)
        self._own, self.address = own, ctypes.addressof(own)


def attend(
    library: KernelLibrary,
    step: StepChunks,
    cache: LayerCache,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None,
    window: int | None,
    *,
    row_parts: int = EXACT,
) -> torch.Tensor:
    """Writes the new `keys` and `values` to the cache, then attends over it. Takes (num_tokens, heads, dim) each,
    float32, with kv_heads for `keys` and `values`. Returns (num_tokens, heads, value_dim).

    `softcap`: bounds the scaled scores as softcap * tanh(score / softcap). `window`: the size of the sliding window,
    which includes the position itself; None: all earlier positions. `row_parts`: with 1, the library for AMX rounds the
    values that a prompt's tokens see, and their weights, to bfloat16, as a `PackedWeight` rounds its rows."""
    call, tensors = _AttentionArguments.of((queries, keys, values), scaling, softcap, window, row_parts=row_parts)
    library.attend(step.address, cache.address, ctypes.addressof(call), num_threads())
    return tensors[-1]


def attend_pictures(
    library: KernelLibrary,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: Iterable[int],
    *,
    scaling: float,
    row_parts: int = EXACT,
) -> torch.Tensor:
    """Attends with each picture's patches over all patches of the picture. Takes (num_patches, heads, dim) each,
    float32; `keys` and `values` may have fewer heads. Returns (num_patches, heads, value_dim).

    `starts`: (num_pictures + 1), the start of each picture's patches and the end of the last picture's. `row_parts`: as
    for `attend`."""
    bounds = array("i", starts)
    assert bounds[-1] == len(queries), "the pictures are all patches"
    pictures = _Pictures(address_of(bounds), len(bounds) - 1, keys.shape[1], keys.shape[2], values.shape[2])
    call, tensors = _AttentionArguments.of((queries, keys, values), scaling, row_parts=row_parts)
    library.attend_pictures(ctypes.addressof(pictures), ctypes.addressof(call), num_threads())
    return tensors[-1]
