"""The rotary embeddings of vision towers by Raylens' kernels (`cpu_kernels/rotary.py`)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.rotary import rotated
from raylens.modeling.function_replacement import forward_of, replace_functions
from raylens.modeling.trial import agree

_NAME = "apply_rotary_pos_emb_vision"
"""transformers' function of queries, keys, cosines and sines: (num_patches, heads, dim) and (num_patches, dim)."""
_TRIAL_SHAPES = ((3, 2, 8), (3, 2, 8), (3, 8), (3, 8))


def rotate_by_kernels(library: KernelLibrary, model: nn.Module, is_included: Callable[[str], bool]) -> None:
    """Replaces the function in all modules that call it, in place, if the results for random heads agree.
    `is_included`: returns whether to change the module of a name."""
    own = partial(_rotate, library)
    for name, module in model.named_modules():
        forward = forward_of(module)
        calls_it = is_included(name) and _NAME in forward.__code__.co_names
        if calls_it and agree(own, forward.__globals__[_NAME], *_TRIAL_SHAPES):
            replace_functions(module, {_NAME: own})


def _rotate(
    library: KernelLibrary, queries: torch.Tensor, keys: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotated(library, queries, cosines, sines), rotated(library, keys, cosines, sines)
