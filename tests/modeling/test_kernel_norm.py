"""RMS norms of a model become calls of the kernels, and what only looks like one stays as it is."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.pixtral.modeling_pixtral import PixtralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from raylens.cpu_kernels.library import kernel_library
from raylens.modeling.kernel_norm import KernelNorm, replace_norms


class Doubled(Qwen2RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = 2 * super().forward(hidden_states)
        return output


def replaced(norm: nn.Module, *, name: str = "0") -> nn.Module:
    model, library = nn.Sequential(norm).requires_grad_(False), kernel_library()
    assert library is not None
    replace_norms(library, model, lambda given: given == name)
    return model[0]


@pytest.mark.parametrize("kind", [Qwen2RMSNorm, PixtralRMSNorm, nn.RMSNorm])
def test_rms_norms_become_one_call(kind: type[nn.Module]) -> None:
    norm = kind(24, eps=1e-3)
    norm.weight.data = torch.randn(24)
    own, rows = replaced(norm), torch.randn(5, 24)
    assert isinstance(own, KernelNorm)
    assert own.weight is norm.weight
    torch.testing.assert_close(own(rows), norm(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(24),
        Gemma3RMSNorm(24),  # its weight is an offset from 1
        Doubled(24),
        Qwen2RMSNorm(24).bfloat16(),
        nn.RMSNorm((2, 12), eps=1e-6),
        nn.RMSNorm(24, eps=1e-6, elementwise_affine=False),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_what_computes_something_else_stays(norm: nn.Module) -> None:
    assert replaced(norm) is norm


def test_only_the_named_modules_are_replaced() -> None:
    norm = Qwen2RMSNorm(24)
    assert replaced(norm, name="1") is norm
