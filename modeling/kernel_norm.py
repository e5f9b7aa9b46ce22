"""RMS norms by Raylens' kernels (`cpu_kernels/norm.py`)."""

from collections.abc import Callable

import torch
from torch import nn

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.norm import Norm, normed
from raylens.modeling.submodules import submodules
from raylens.modeling.trial import agree

_TRIAL_ROWS = 4


class KernelNorm(nn.Module):
    """Computes x / sqrt(mean(x * x) + eps) * weight."""

    def __init__(self, library: KernelLibrary, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._library, self._norm = library, Norm(weight.detach(), eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return normed(self._library, self._norm, hidden_states)


def replace_norms(library: KernelLibrary, model: nn.Module, is_included: Callable[[str], bool]) -> None:
    """Replaces RMS norms of a model by `KernelNorm`, in place, if the results for random rows agree. `is_included`:
    returns whether to replace the module of a name."""
    for name, module in submodules(model):
        if is_included(name) and (own := _own(library, module)) is not None:
            model.set_submodule(name, own)


def epsilon_of(norm: nn.Module) -> float | None:
    """Returns the number that an RMS norm of transformers adds to the mean square, or None for another module."""
    found = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    return found if isinstance(found, float) else None


def _own(library: KernelLibrary, module: nn.Module) -> KernelNorm | None:
    eps, weight = epsilon_of(module), getattr(module, "weight", None)
    if eps is None or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or weight.dtype != torch.float32:
        return None
    own = KernelNorm(library, weight, eps)
    return own if agree(own, module, (_TRIAL_ROWS, len(weight))) else None
