"""The attention of towers calls the kernels for its rotary embeddings, in the given model only."""

from typing import Any

import torch
from torch import nn
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

from raylens.cpu_kernels.library import kernel_library
from raylens.modeling.kernel_rotary import rotate_by_kernels


def apply_rotary_pos_emb_vision(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates neighbours instead of halves."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos + other * sin

    return turned(q), turned(k)


class Neighbours(nn.Module):
    def forward(self, *args: torch.Tensor) -> Any:
        return apply_rotary_pos_emb_vision(*args)


def changed(model: nn.Module, *, name: str = "0") -> nn.Module:
    library = kernel_library()
    assert library is not None
    rotate_by_kernels(library, nn.Sequential(model), lambda given: given == name)
    return model


def make_attention() -> nn.Module:
    config = Qwen2_5_VLVisionConfig(hidden_size=32, num_heads=4)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    attention: nn.Module = qwen.Qwen2_5_VLVisionAttention(config)
    return attention.eval()


@torch.inference_mode()
def test_a_tower_gives_the_same_without_transformers_function(monkeypatch: Any) -> None:
    own, plain = changed(make_attention()), make_attention()
    rows, turns, bounds = torch.randn(7, 32), (torch.randn(7, 8), torch.randn(7, 8)), torch.tensor([0, 3, 7])
    expected = plain(rows, bounds, position_embeddings=turns)
    calls = []

    def apply(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(args)
        return args[0], args[1]

    monkeypatch.setattr(qwen, "apply_rotary_pos_emb_vision", apply)
    torch.testing.assert_close(own(rows, bounds, position_embeddings=turns), expected, rtol=1e-5, atol=1e-5)
    assert not calls
    plain(rows, bounds, position_embeddings=turns)
    assert calls


def test_another_rotation_and_other_modules_stay() -> None:
    for module, name in ((Neighbours(), "0"), (make_attention(), "1"), (nn.Linear(2, 2), "0"), (nn.ModuleList(), "0")):
        assert "forward" not in vars(changed(module, name=name))
