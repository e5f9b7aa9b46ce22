"""Linear layers whose weights are laid out for the CPU once, at start-up.

oneDNN reads a weight in blocks of its own; PyTorch's Linear hands it over row by row, which leaves most of the
processor's width unused where few rows are multiplied, as in decoding.
"""

import torch
from torch import nn

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """What `linear` computes, in the same dtype. Its weight can neither be trained nor read any more."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self._weight, self._bias, "none", [], "")
        return output


def pack_linear_layers(model: nn.Module) -> None:
    """Replaces the plain linear layers of a model, in place, where they are on the CPU and oneDNN takes their dtype.

    A weight that is tied to the embeddings is laid out apart from these.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype in _DTYPES:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, PackedLinear(module))
