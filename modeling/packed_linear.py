"""Packs the weights of linear layers for the CPU once, at start-up.

float32 goes to Raylens' own kernels if they were built (`cpu_kernels`), and everything else to oneDNN."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from raylens.cpu_kernels.huge_pages import HugePages
from raylens.cpu_kernels.library import KernelLibrary, kernel_library
from raylens.cpu_kernels.packed_weight import PackedWeight, WeightLayout
from raylens.modeling.onednn_linear import OneDnnLinear, onednn_dtypes
from raylens.modeling.submodules import submodules


class KernelLinear(nn.Module):
    """A Linear with this packed weight and bias, (out_features,) float32."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.layout.out_features, weight.layout.in_features
        self.packed_weight = weight
        self.bias = None if bias is None else bias.detach().contiguous()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        return self.packed_weight.product(input, self.bias)


class LinearPacker:
    """Packs the announced weights, in the same order."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        """`weights`: all weights that `pack` will get, all packable."""
        layouts = [WeightLayout.of(weight) if has_kernel_layers(weight.dtype) else None for weight in weights]
        self._layouts = iter(layouts)
        self._library = kernel_library()
        if (library := self._library) is not None:
            self._pages = HugePages(layout.num_bytes(library) for layout in layouts if layout is not None)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
        """Returns a packed Linear with this weight, (out_features, in_features), and bias, in the same dtype. The
        weight can no longer be trained or read."""
        layout = next(self._layouts)
        if layout is None:
            return OneDnnLinear(weight, bias)
        library: KernelLibrary = self._library  # type: ignore[assignment]
        return KernelLinear(PackedWeight(library, weight, layout, self._pages), bias)


def pack_linear_layers(model: nn.Module, is_included: Callable[[str], bool] = lambda name: True) -> None:
    """Replaces the plain linear layers of a model, in place, if they are on the CPU and in a packable dtype.

    `is_included`: returns whether to replace the layer of a name. A weight tied to the embeddings is copied."""
    found = [
        (name, module)
        for name, module in submodules(model)
        if type(module) is nn.Linear and is_included(name) and is_packable(module.weight)
    ]
    packer = LinearPacker(module.weight for _, module in found)
    while found:  # one by one, so that each packed weight is freed at once
        name, module = found.pop(0)
        model.set_submodule(name, packer.pack(module.weight, module.bias))


def is_packable(weight: torch.Tensor) -> bool:
    """Returns whether the weight is on the CPU and in a packable dtype."""
    return weight.device.type == "cpu" and weight.dtype in packable_dtypes()


def has_kernel_layers(dtype: torch.dtype) -> bool:
    """Returns whether packed layers of this dtype run on Raylens' own kernels."""
    return dtype == torch.float32 and kernel_library() is not None


def packable_dtypes() -> tuple[torch.dtype, ...]:
    """Returns the dtypes with packed layers on this processor."""
    own = (torch.float32,) if has_kernel_layers(torch.float32) else ()
    return tuple(dict.fromkeys(own + onednn_dtypes()))
