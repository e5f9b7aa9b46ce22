"""MLPs of two or three packed linear layers, each in one call of Raylens' kernels (`cpu_kernels/mlp.py`)."""

from collections.abc import Callable, Iterator
from itertools import permutations

import torch
from torch import nn

from raylens.cpu_kernels.library import kernel_library
from raylens.cpu_kernels.mlp import Activation, Linear, Mlp
from raylens.modeling.packed_linear import KernelLinear
from raylens.modeling.submodules import submodules
from raylens.modeling.trial import agree

_ACTIVATIONS: dict[str, Activation] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
    "QuickGELUActivation": "quick_gelu",
}
"""By the name of transformers' class."""
_TRIAL_ROWS = 4


class KernelMlp(nn.Module):
    """Computes `down(activation(first(x)))` or `down(activation(first(x)) * up(x))`. It keeps the children of the `mlp`
    that it replaces."""

    def __init__(
        self, mlp: nn.Module, first: KernelLinear, up: KernelLinear | None, down: KernelLinear, activation: Activation
    ) -> None:
        super().__init__()
        for name, child in mlp.named_children():
            self.add_module(name, child)
        library = kernel_library()
        assert library is not None, "a kernel layer has one"
        self.in_features = first.in_features
        self._mlp = Mlp(library, _linear(first), None if up is None else _linear(up), _linear(down), activation)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._mlp.run(hidden_states)


def fuse_mlps(model: nn.Module, is_included: Callable[[str], bool] = lambda name: True) -> None:
    """Replaces MLPs of a model by `KernelMlp`, in place, if the results for random rows agree. Linear layers must be
    packed before. `is_included`: returns whether to replace the module of a name."""
    for name, module in submodules(model):
        if is_included(name) and (fused := _fused(module)) is not None:
            model.set_submodule(name, fused)


def kernel_activation(module: nn.Module) -> Activation | None:
    """Returns the kernels' name of an activation, or None for an unsupported one."""
    return _ACTIVATIONS.get(type(module).__name__)


def _fused(module: nn.Module) -> KernelMlp | None:
    candidates = _candidates(module)
    return next((one for one in candidates if agree(one, module, (_TRIAL_ROWS, one.in_features))), None)


def _candidates(module: nn.Module) -> Iterator[KernelMlp]:
    """Yields the possible MLPs of a module with two or three packed layers and an activation as children."""
    children = [child for child in module.children() if not isinstance(child, nn.Dropout | nn.Identity)]
    layers = [child for child in children if isinstance(child, KernelLinear)]
    others = [child for child in children if not isinstance(child, KernelLinear)]
    activations = {kernel_activation(child) for child in others}
    activation = activations.pop() if len(activations) == 1 else None
    if activation is None or len(layers) not in (2, 3) or list(module.parameters(recurse=False)):
        return
    for first, *middle, down in permutations(layers):
        up = middle[0] if middle else None
        is_gate = up is None or (up.in_features, up.out_features) == (first.in_features, first.out_features)
        if is_gate and down.in_features == first.out_features:
            yield KernelMlp(module, first, up, down, activation)


def _linear(layer: KernelLinear) -> Linear:
    return Linear(layer.packed_weight, layer.bias)
