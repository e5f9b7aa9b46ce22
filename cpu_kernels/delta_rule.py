"""One token of the gated delta rule in one call, see `csrc/delta_rule.h`."""

import ctypes

import torch

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.structures import addresses, integers
from raylens.cpu_kernels.threads import num_threads


class _DeltaStep(ctypes.Structure):
    _fields_ = [
        *integers("num_heads", "key_dim", "value_dim"),
        *addresses("states", "queries", "keys", "values", "decays", "betas", "outputs"),
    ]


def delta_step(
    library: KernelLibrary,
    states: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
) -> torch.Tensor:
    """Changes `states` (num_heads, key_dim, value_dim) in place, and returns the outputs (num_heads, value_dim).

    `queries` and `keys` are (num_heads, key_dim), `values` (num_heads, value_dim), `decays`, from 0 to 1, and `betas`
    (num_heads,): float32, contiguous. The heads of several sequences lie one behind another. Raises ValueError for
    other shapes, and for a `value_dim` that is no multiple of `library.lanes`."""
    num_heads, key_dim, value_dim = states.shape
    given = (states, queries, keys, values, decays, betas)
    shapes = ((num_heads, key_dim, value_dim), *[(num_heads, key_dim)] * 2, (num_heads, value_dim), *[(num_heads,)] * 2)
    if value_dim % library.lanes or any(
        tensor.shape != shape or tensor.dtype is not torch.float32 or not tensor.is_contiguous()
        for tensor, shape in zip(given, shapes, strict=True)
    ):
        raise ValueError(
            f"the delta rule takes contiguous float32 tensors of matching shapes, got {list(states.shape)}"
        )
    outputs = torch.empty_like(values)
    step = _DeltaStep(num_heads, key_dim, value_dim, *(tensor.data_ptr() for tensor in (*given, outputs)))
    library.delta_step(ctypes.addressof(step), num_threads())
    return outputs
