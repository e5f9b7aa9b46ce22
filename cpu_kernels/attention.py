"""Attention over a paged cache in one call a layer, for all decoding sequences and chunks (`csrc/attention.h`), and
attention of pictures (`csrc/picture_attention.h`).

The structures mirror `csrc/paged_cache.h` and `csrc/attention_call.h`.
"""

import ctypes
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from raylens.cpu_kernels.huge_pages import HugePages
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.threads import num_threads

NO_SPAN = -1
"""Mirrors `kNoSpan`: the number of a position outside of bidirectional spans."""
_NO_SPANS: Mapping[int, Sequence[int]] = MappingProxyType({})


class _LayerCache(ctypes.Structure):
    _fields_ = [("keys", ctypes.c_void_p), ("values", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("kv_heads", "num_slots", "block_size", "key_dim", "value_dim")
    ]


class _StepChunks(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("slots", "blocks", "first_blocks", "lengths", "ends", "prompt_ends")),
        *((name, ctypes.c_void_p) for name in ("spans", "first_spans")),
        *((name, ctypes.c_int64) for name in ("num_chunks", "num_tokens", "windows_cut_spans")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Rows":
        token_stride, head_stride, _ = tensor.stride()
        return cls(tensor.data_ptr(), token_stride, head_stride)


class _AttentionArguments(ctypes.Structure):
    _fields_ = [
        ("queries", _Rows),
        ("keys", _Rows),
        ("values", _Rows),
        ("output", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class _Pictures(ctypes.Structure):
    _fields_ = [("starts", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("count", "kv_heads", "key_dim", "value_dim")
    ]


def padded_dim(library: KernelLibrary, dim: int) -> int:
    """Returns the numbers of a cache row in memory: `dim`, rounded up to whole vectors."""
    return -(-dim // library.lanes) * library.lanes


class LayerCache:
    """A layer's keys and values, float32, (kv_heads, num_slots, dim) each. Zeros pad each row to whole vectors."""

    def __init__(
        self,
        library: KernelLibrary,
        *,
        kv_heads: int,
        num_slots: int,
        block_size: int,
        key_dim: int,
        value_dim: int,
    ) -> None:
        shapes = [(kv_heads, num_slots, padded_dim(library, dim)) for dim in (key_dim, value_dim)]
        sizes = [math.prod(shape) * torch.float32.itemsize for shape in shapes]
        pages = HugePages(sizes)
        rows = [pages.take(size).view(torch.float32).view(shape) for size, shape in zip(sizes, shapes, strict=True)]
        self.keys, self.values = rows[0][..., :key_dim], rows[1][..., :value_dim]
        self.value_dim = value_dim
        own = _LayerCache(rows[0].data_ptr(), rows[1].data_ptr(), kv_heads, num_slots, block_size, key_dim, value_dim)
        self._own, self.address = own, ctypes.addressof(own)


class StepChunks:
    """A step's chunks in the library's form. `slots`: (num_tokens,), int64, the cache slots of the tokens.

    `block_tables`, `lengths`, `ends` and `prompt_ends` have an entry for each chunk: its sequence's blocks, its number
    of tokens, the positions up to its end, and the positions of the sequence's prompt. Prompt tokens and generated
    tokens have different orders of summation, which are the same in every step.

    `spans`: by chunk, the number of each position's bidirectional span, from the sequence's first position up to the
    chunk's end, or NO_SPAN. The positions of a span see each other. Chunks without spans may be left out.
    `windows_cut_spans`: whether a layer's window also applies within spans.
    """

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
        if spans:
            arrays += _joined(spans, len(lengths))
        self._kept = (slots, arrays)
        addresses = [one.buffer_info()[0] for one in arrays]
        own = _StepChunks(slots.data_ptr(), *addresses, *([] if spans else (None, None)))
        own.num_chunks, own.num_tokens, own.windows_cut_spans = len(lengths), len(slots), windows_cut_spans
        self._own, self.address = own, ctypes.addressof(own)


def _joined(spans: Mapping[int, Sequence[int]], num_chunks: int) -> "list[array[Any]]":
    """Returns the concatenated spans of the chunks, and the start of each chunk's spans, or -1 for a chunk without."""
    joined, firsts = array("f"), array("i", [-1]) * num_chunks
    for chunk, own in spans.items():
        firsts[chunk] = len(joined)
        joined.extend(own)
    return [joined, firsts]


def attend(
    library: KernelLibrary,
    step: StepChunks,
    cache: LayerCache,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
    window: int | None,
) -> torch.Tensor:
    """Writes the new `keys` and `values` to the cache, then attends over it. Takes (num_tokens, heads, dim) each,
    float32, with kv_heads for `keys` and `values`. Returns (num_tokens, heads, value_dim).

    `softcap`: bounds the scaled scores as softcap * tanh(score / softcap). `window`: the size of the sliding window,
    which includes the position itself; None: all earlier positions.
    """
    queries, keys, values = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (queries, keys, values))
    num_tokens, heads, _ = queries.shape
    output = queries.new_empty(num_tokens, heads, cache.value_dim)
    call = _AttentionArguments(
        _Rows.of(queries),
        _Rows.of(keys),
        _Rows.of(values),
        output.data_ptr(),
        heads,
        window or 0,
        scaling,
        softcap or 0.0,
    )
    library.attend(step.address, cache.address, ctypes.addressof(call), num_threads())
    return output


def attend_pictures(
    library: KernelLibrary,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: Iterable[int],
    *,
    scaling: float,
) -> torch.Tensor:
    """Attends with each picture's patches over all patches of the picture. Takes (num_patches, heads, dim) each,
    float32; `keys` and `values` may have fewer heads. Returns (num_patches, heads, value_dim).

    `starts`: (num_pictures + 1), the start of each picture's patches and the end of the last picture's."""
    queries, keys, values = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (queries, keys, values))
    num_patches, heads, key_dim = queries.shape
    kv_heads, value_dim = values.shape[1:]
    bounds = array("i", starts)
    assert bounds[-1] == num_patches, "the pictures are all patches"
    output = queries.new_empty(num_patches, heads, value_dim)
    pictures = _Pictures(bounds.buffer_info()[0], len(bounds) - 1, kv_heads, key_dim, value_dim)
    call = _AttentionArguments(
        _Rows.of(queries), _Rows.of(keys), _Rows.of(values), output.data_ptr(), heads, 0, scaling, 0.0
    )
    library.attend_pictures(ctypes.addressof(pictures), ctypes.addressof(call), num_threads())
    return output
