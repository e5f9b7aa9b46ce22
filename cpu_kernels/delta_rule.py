"""Tokens of the gated delta rule in one call, see `csrc/delta_rule.h`."""

import ctypes
from array import array
from collections.abc import Sequence

import torch

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.structures import address_of, addresses, integers
from raylens.cpu_kernels.threads import num_threads


class _DeltaRows(ctypes.Structure):
    _fields_ = [
        *integers("num_rows", "num_heads", "key_dim", "value_dim"),
        *addresses("states", "queries", "keys", "values", "decays", "betas", "outputs", "sources", "targets"),
    ]


def delta_rows(
    library: KernelLibrary,
    states: torch.Tensor,
    sources: Sequence[int],
    targets: Sequence[int],
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
) -> torch.Tensor:
    """Computes rows, each a token of some sequence, one after another. Returns the outputs (num_rows, num_heads,
    value_dim).

    `states` are (num_slots, num_heads, key_dim, value_dim). Row i continues from slot `sources[i]` and writes to slot
    `targets[i]`, which may be the same, and which a later row may continue from. `queries` and `keys` are (num_rows,
    num_heads, key_dim), `values` (num_rows, num_heads, value_dim), `decays`, from 0 to 1, and `betas` (num_rows,
    num_heads): float32, contiguous. Raises ValueError for other shapes, for other slots, and for a `value_dim` that is
    no multiple of `library.lanes`."""
    num_slots, num_heads, key_dim, value_dim = states.shape
    heads = (len(sources), num_heads)
    given = (states, queries, keys, values, decays, betas)
    shapes = (states.shape, *[(*heads, key_dim)] * 2, (*heads, value_dim), heads, heads)
    if value_dim % library.lanes or any(
        tensor.shape != shape or tensor.dtype is not torch.float32 or not tensor.is_contiguous()
        for tensor, shape in zip(given, shapes, strict=True)
    ):
        raise ValueError(
            f"the delta rule takes contiguous float32 tensors of matching shapes, got {list(states.shape)}"
        )
    if len(sources) != len(targets) or not all(0 <= slot < num_slots for slot in (*sources, *targets)):
        raise ValueError(f"the delta rule takes a source and a target for each row, below {num_slots}")
    outputs, slots = torch.empty_like(values), (array("q", sources), array("q", targets))
    memories = (*(tensor.data_ptr() for tensor in (*given, outputs)), *map(address_of, slots))
    step = _DeltaRows(len(sources), num_heads, key_dim, value_dim, *memories)
    library.delta_rows(ctypes.addressof(step), num_threads())
    return outputs
