"""Patch convolutions of pictures, computed on the CPU as one matrix product.

Their windows do not overlap, so each patch is a row of one matrix, and the kernel is the other matrix."""

import math
from collections.abc import Callable
from itertools import chain
from typing import TypeGuard

import torch
from torch import nn

from raylens.modeling.packed_linear import packable_dtypes, packed_linear
from raylens.modeling.submodules import submodules


class PackedPatches(nn.Module):
    """Replaces `convolution`, on the CPU and in a packable dtype. Its stride must equal its kernel.

    `weight` stays, because other code reads its dtype and device."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self._linear = packed_linear(convolution.weight.flatten(1), convolution.bias, convolution.weight.dtype)
        self.weight = convolution.weight
        self._kernel = tuple(convolution.kernel_size)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that convolutions give it
        """Takes (batch, channels, *sizes), returns (batch, out_channels, *(sizes // kernel)). Partial patches are
        dropped."""
        counts = [size // side for size, side in zip(input.shape[2:], self._kernel, strict=True)]
        whole = input
        for axis, (count, side) in enumerate(zip(counts, self._kernel, strict=True), start=2):
            whole = whole.narrow(axis, 0, count * side)
        grid = whole.reshape(*input.shape[:2], *chain(*zip(counts, self._kernel, strict=True)))
        num_axes = len(counts)
        patches = grid.permute(0, *range(2, 2 + 2 * num_axes, 2), 1, *range(3, 3 + 2 * num_axes, 2))
        product: torch.Tensor = self._linear(patches.flatten(num_axes + 1))
        return product.movedim(-1, 1)


def pack_patch_convolutions(model: nn.Module, is_included: Callable[[str], bool] = lambda name: True) -> None:
    """Replaces the patch convolutions of a model, in place, if they are on the CPU and in a packable dtype.
    `is_included`: see `pack_linear_layers`."""
    for name, module in submodules(model):
        if is_included(name) and _cuts_patches(module):
            model.set_submodule(name, PackedPatches(module))


def _cuts_patches(module: nn.Module) -> TypeGuard[nn.Conv2d | nn.Conv3d]:
    return (
        type(module) in (nn.Conv2d, nn.Conv3d)
        and module.kernel_size == module.stride
        and math.prod(module.kernel_size) > 1  # type: ignore[arg-type]
        and module.padding in ("valid", (0,) * len(module.kernel_size))  # type: ignore[arg-type]
        and set(module.dilation) == {module.groups} == {1}  # type: ignore[arg-type]
        and module.weight.device.type == "cpu"
        and module.weight.dtype in packable_dtypes()
    )
