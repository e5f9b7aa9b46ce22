"""Linear layers with 8-bit weights and a scale for each output, half the size of bfloat16.

The quantisation is weight-only, symmetric, round-to-nearest: weight = int8 * scale, scale = max(abs(row)) / 127."""

from collections.abc import Callable

import torch
from torch import nn

from raylens.modeling.submodules import submodules

# Few rows are memory-bound, so 8-bit weights help. More rows are compute-bound, and the kernel is no faster for them.
MAX_ROWS_FOR_KERNEL = 32
# The CPU kernel reads a row in steps of so many numbers, even beyond its end.
_KERNEL_STEP = 16


class Int8Linear(nn.Module):
    """Replaces `linear`. On the CPU, PyTorch's kernel for 8-bit weights multiplies few rows in bfloat16. Other calls
    convert the weights to the input's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scales = weight.abs().amax(dim=1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny) / 127
        self._weight = (weight.float() / scales).round_().to(torch.int8)
        self._scales = scales[:, 0].to(weight.dtype)
        self._kernel_scales = self._scales.bfloat16()
        self.bias = None if linear.bias is None else linear.bias.detach()
        # A GPU's kernel would leave its tensor cores idle.
        self._has_kernel = self.in_features % _KERNEL_STEP == 0 and weight.device.type == "cpu"

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the dequantized weights, (out_features, in_features)."""
        return self._weight.to(dtype) * self._scales.to(dtype)[:, None]

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        num_rows = input.numel() // self.in_features
        if not self._has_kernel or not 0 < num_rows <= MAX_ROWS_FOR_KERNEL:
            return nn.functional.linear(input, self.dequantized(input.dtype), self.bias)
        rows = input.reshape(num_rows, self.in_features).bfloat16().contiguous()
        product = torch.ops.aten._weight_int8pack_mm(rows, self._weight, self._kernel_scales).to(input.dtype)
        output: torch.Tensor = product.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def quantize_linear_layers(model: nn.Module, is_included: Callable[[str], bool] = lambda name: True) -> None:
    """Replaces the plain linear layers of a model in place, one after another. Routers of experts, and experts stored
    as one weight, are not quantized.

    `is_included`: returns whether to replace the layer of a name."""
    for name, module in submodules(model):
        is_router = name.rpartition(".")[2] in ("gate", "router")
        if type(module) is nn.Linear and is_included(name) and not is_router:
            model.set_submodule(name, Int8Linear(module))
