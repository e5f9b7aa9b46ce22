"""Lets layers of transformers' gated delta rule compute single tokens by Raylens' kernel, in place.

transformers' own function makes five passes over the states. The kernel makes two, and the second finds a head's state
in the processor's cache."""

import inspect
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from raylens.cpu_kernels.delta_rule import delta_step
from raylens.cpu_kernels.library import KernelLibrary

_NAME = "torch_recurrent_gated_delta_rule"
"""Of transformers' function for single tokens, in the modules of models that have such layers."""


def use_delta_kernel(mixer: nn.Module, library: KernelLibrary) -> None:
    """Replaces the function in this layer alone. Does nothing for a layer of another kind."""
    forward = inspect.unwrap(type(mixer).forward)
    own = forward.__globals__.get(_NAME)
    if own is None:
        return
    names = {**forward.__globals__, _NAME: partial(_recurrent_rule, library, own)}
    changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    mixer.forward = MethodType(changed, mixer)


def _recurrent_rule(
    library: KernelLibrary,
    otherwise: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Takes what transformers' function takes: `query` and `key` (batch, 1, key_heads, key_dim), `value` (batch, 1,
    heads, value_dim), `g`, the logarithms of decays, and `beta` (batch, 1, heads), `initial_state` (batch, heads,
    key_dim, value_dim). Returns the outputs (batch, 1, heads, value_dim) and the states, which it changes in place."""
    batch_size, num_tokens, num_heads, value_dim = value.shape
    fits = value_dim % library.lanes == 0 and value.dtype is torch.float32
    if initial_state is None or num_tokens != 1 or not fits or not initial_state.is_contiguous():
        norm = use_qk_l2norm_in_kernel
        given = {"g": g, "beta": beta, "initial_state": initial_state, "use_qk_l2norm_in_kernel": norm, **others}
        found: tuple[torch.Tensor, torch.Tensor | None] = otherwise(query, key, value, **given)
        return found
    if use_qk_l2norm_in_kernel:
        query, key = _normalized(query), _normalized(key)
    query = query * query.shape[-1] ** -0.5
    group = num_heads // key.shape[2]
    outputs = delta_step(
        library,
        initial_state.flatten(0, 1),
        _of_all_heads(query, group),
        _of_all_heads(key, group),
        value.reshape(-1, value_dim),
        g.exp().flatten(),
        beta.contiguous().flatten(),
    )
    return outputs.view(batch_size, 1, num_heads, value_dim), initial_state


def _normalized(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + 1e-6)


def _of_all_heads(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Returns (batch * heads, key_dim): each key head serves `group` consecutive heads."""
    repeated = rows if group == 1 else rows.repeat_interleave(group, dim=2)
    return repeated.reshape(-1, rows.shape[-1])
