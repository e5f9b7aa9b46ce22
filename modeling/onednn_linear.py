"""Linear layers with weights in the blocked layout of oneDNN, PyTorch's CPU library for matrix products.

PyTorch's Linear passes the weight row by row, which uses little of the vector width for few rows, as in decoding."""

import torch
from torch import nn


class OneDnnLinear(nn.Module):
    """A Linear with this weight, (out_features, in_features), and bias, in the same dtype. The weight can no longer be
    trained or read."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        num_rows = input.numel() // self.in_features
        num_padding = padded_rows(num_rows) - num_rows
        if not num_padding:
            return self._multiply(input)
        rows = nn.functional.pad(input.reshape(num_rows, self.in_features), (0, 0, 0, num_padding))
        return self._multiply(rows)[:num_rows].view(*input.shape[:-1], self.out_features)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return output


def padded_rows(num_rows: int) -> int:
    """Returns `num_rows` or a few more: each number up to 8, then four in each octave (10, 12, 14, 16, 20, 24, ...).

    oneDNN compiles and keeps a kernel for each number of rows, in milliseconds each. Prompts of all lengths would cause
    compilation in hundreds of steps and take hundreds of megabytes."""
    step = 1 << max(0, (num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


def onednn_dtypes() -> tuple[torch.dtype, ...]:
    """Returns oneDNN's dtypes on this processor. On x86, bfloat16 needs AVX-512 or AVX-NE-CONVERT."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ()
    takes_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if takes_bfloat16 else (torch.float32,)
