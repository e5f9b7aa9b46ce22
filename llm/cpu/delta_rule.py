"""Single tokens of transformers' gated delta rule by Raylens' kernel, in their slots.

transformers' own function makes five passes over the states. The kernel makes two, and the second finds a head's state
in the processor's cache."""

from typing import Any

import torch

from raylens.cpu_kernels.delta_rule import delta_rows
from raylens.cpu_kernels.library import KernelLibrary
from raylens.llm.states.slot_states import SlotStates


def delta_rule(
    library: KernelLibrary,
    otherwise: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | SlotStates | None,
    use_qk_l2norm_in_kernel: bool,
    **others: Any,
) -> tuple[torch.Tensor, Any]:
    """Takes what transformers' function takes: `query` and `key` (batch, 1, key_heads, key_dim), `value` (batch, 1,
    heads, value_dim), `g`, the logarithms of decays, and `beta` (batch, 1, heads). `initial_state`: slots of (heads,
    key_dim, value_dim), changed in place. Returns the outputs (batch, 1, heads, value_dim) and `initial_state`. Calls
    `otherwise` for what the kernel does not support."""
    batch_size, _, num_heads, value_dim = value.shape
    fits = value_dim % library.lanes == 0 and value.dtype is torch.float32
    if not isinstance(initial_state, SlotStates) or not fits:
        norm = use_qk_l2norm_in_kernel
        given = {"g": g, "beta": beta, "initial_state": initial_state, "use_qk_l2norm_in_kernel": norm, **others}
        found: tuple[torch.Tensor, Any] = otherwise(query, key, value, **given)
        return found
    if use_qk_l2norm_in_kernel:
        query, key = _normalized(query), _normalized(key)
    query = query * query.shape[-1] ** -0.5
    group = num_heads // key.shape[2]
    outputs = delta_rows(
        library,
        initial_state.pool,
        [slot for wave in initial_state.waves for slot in wave.sources],
        [slot for wave in initial_state.waves for slot in wave.targets],
        _of_all_heads(query, group),
        _of_all_heads(key, group),
        value[:, 0].contiguous(),
        g.exp().view(batch_size, num_heads),
        beta.reshape(batch_size, num_heads),
    )
    return outputs.unsqueeze(1), initial_state


def _normalized(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + 1e-6)


def _of_all_heads(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Returns (batch, heads, key_dim): each key head serves `group` consecutive heads."""
    return (rows if group == 1 else rows.repeat_interleave(group, dim=2))[:, 0].contiguous()
