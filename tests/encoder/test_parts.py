"""Tower and projector each have a dtype and linear layers of a form of their own, for every family."""

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from encoder.config import EncoderConfig, PartConfig
from encoder.loader import load_vision_half
from modeling.packed_linear import PackedLinear
from tests.encoder.small_vision import Small

PLAIN = PartConfig()
WITHOUT_PROJECTOR = ("chameleon", "fuyu")


def load(small: Small, tower: PartConfig, projector: PartConfig) -> PreTrainedModel:
    model, _ = load_vision_half(EncoderConfig(small.checkpoint, tower=tower, projector=projector))
    return model


@torch.inference_mode()
def encoded(small: Small, half: PreTrainedModel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Embeddings of each item with those of the whole model."""
    for prompt in small.prompts:
        found = small.modality(prompt).encode(half, prompt.tensors)
        yield from zip(found, prompt.expected, strict=True)


def is_projector(small: Small, name: str) -> bool:
    return name.startswith(small.family.projector) if small.family.projector else False


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of what was expected, how large a part the difference is."""
    return float((found.float() - expected).norm() / expected.norm())


def of_type(half: nn.Module, kind: type[nn.Module]) -> set[str]:
    return {name for name, module in half.named_modules() if type(module) is kind}


def test_embeddings_of_packed_layers_are_close(small: Small) -> None:
    packed = PartConfig(linear="packed")
    half = load(small, packed, packed)
    assert of_type(half, PackedLinear) or small.model_type == "chameleon"  # all convolutions
    for found, expected in encoded(small, half):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_embeddings_of_int8_layers_are_near(small: Small) -> None:
    int8 = PartConfig(linear="int8")
    for found, expected in encoded(small, load(small, int8, int8)):
        assert found.dtype == torch.float32
        print("DIST8", small.model_type, distance(found, expected))


def test_embeddings_of_a_bfloat16_tower_are_near(small: Small) -> None:
    half = load(small, PartConfig(dtype=torch.bfloat16), PLAIN)
    for found, expected in encoded(small, half):
        assert found.dtype == (torch.bfloat16 if small.model_type in WITHOUT_PROJECTOR else torch.float32)
        print("DIST16", small.model_type, distance(found, expected))
