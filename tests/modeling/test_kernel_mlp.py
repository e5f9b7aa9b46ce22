"""MLPs of transformers become one call, and what only looks like one stays as it is."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionMlp

from raylens.cpu_kernels.library import VARIABLE
from raylens.modeling.kernel_mlp import KernelMlp, fuse_mlps
from raylens.modeling.packed_linear import pack_linear_layers


def make_clip(activation: str) -> CLIPMLP:
    return CLIPMLP(CLIPVisionConfig(hidden_size=12, intermediate_size=40, hidden_act=activation))


MLPS: dict[str, Callable[[], nn.Module]] = {
    "clip_quick_gelu": lambda: make_clip("quick_gelu"),
    "clip_gelu": lambda: make_clip("gelu"),
    "clip_gelu_tanh": lambda: make_clip("gelu_pytorch_tanh"),
    "llama": lambda: LlamaMLP(LlamaConfig(num_attention_heads=1, hidden_size=12, intermediate_size=40)),
    "qwen2_vl": lambda: VisionMlp(12, 40, "quick_gelu"),
    "qwen2_5_vl": lambda: Qwen2_5_VLMLP(Qwen2_5_VLVisionConfig(hidden_size=12, intermediate_size=40), bias=True),
    # Where the order of the layers does not show by their sizes.
    "square": lambda: LlamaMLP(LlamaConfig(num_attention_heads=1, hidden_size=12, intermediate_size=12)),
}


class Scaled(nn.Module):
    """Has the layers of an MLP, and does something else with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(12, 40), ACT2FN["gelu"], nn.Linear(40, 12)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = 2 * self.second(self.act(self.first(hidden_states)))
        return output


class OfTwoInputs(Scaled):
    def forward(self, hidden_states: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states + more[0])


def packed(module: nn.Module) -> nn.Sequential:
    model = nn.Sequential(module).requires_grad_(False).eval()
    pack_linear_layers(model, torch.float32)
    return model


@pytest.mark.parametrize("name", MLPS)
def test_mlps_become_one_call(name: str) -> None:
    torch.manual_seed(0)
    model = packed(MLPS[name]())
    rows = torch.randn(3, 7, 12)
    expected = model(rows)
    names = [name for name, _ in model.named_modules()]
    fuse_mlps(model)
    assert isinstance(model[0], KernelMlp)
    torch.testing.assert_close(model(rows), expected, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in model.named_modules()] == names


@pytest.mark.parametrize("kind", [Scaled, OfTwoInputs])
def test_what_computes_something_else_stays(kind: type[nn.Module]) -> None:
    model = packed(kind())
    fuse_mlps(model)
    assert type(model[0]) is kind


def test_only_the_named_modules_are_replaced() -> None:
    model = nn.Sequential(MLPS["llama"](), MLPS["llama"]()).requires_grad_(False)
    pack_linear_layers(model, torch.float32)
    fuse_mlps(model, lambda name: name == "1")
    assert [type(module) for module in model] == [LlamaMLP, KernelMlp]


def test_without_kernels_mlps_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    model = packed(MLPS["llama"]())
    fuse_mlps(model)
    assert isinstance(model[0], LlamaMLP)
