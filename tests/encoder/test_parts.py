"""Tower and projector each have a dtype and linear layers of a form of their own, for every family."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from raylens.encoder.config import EncoderConfig, LinearForm, PartConfig
from raylens.encoder.loader import load_vision_half
from raylens.modeling.packed_linear import KernelLinear
from raylens.modeling.packed_patches import PackedPatches
from tests.encoder.small_vision import Small

PLAIN = PartConfig()
WITHOUT_PROJECTOR = ("chameleon", "fuyu")
WITHOUT_LINEAR_LAYERS = ("chameleon",)
"""All convolutions."""


def load(small: Small, tower: PartConfig = PLAIN, projector: PartConfig = PLAIN) -> PreTrainedModel:
    model, _ = load_vision_half(EncoderConfig(small.checkpoint, tower=tower, projector=projector))
    return model


@pytest.fixture(scope="module")
def plain(small: Small) -> PreTrainedModel:
    return load(small)


@torch.inference_mode()
def encoded(small: Small, half: PreTrainedModel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Embeddings of each item with those of the whole model."""
    for prompt in small.prompts:
        found = small.modality(prompt).encode(half, prompt.tensors)
        yield from zip(found, prompt.expected, strict=True)


def is_projector(small: Small, name: str) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in small.family.projector)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How large a part of what was expected the difference is."""
    return float((found.float() - expected).norm() / expected.norm())


def layers(half: nn.Module, kind: type[nn.Module]) -> set[str]:
    """The names of the layers of a kind, but for those within packed convolutions."""
    inner = {f"{name}._linear" for name, module in half.named_modules() if isinstance(module, PackedPatches)}
    return {name for name, module in half.named_modules() if type(module) is kind} - inner


@pytest.mark.long
def test_embeddings_of_packed_layers_are_close(small: Small) -> None:
    packed = PartConfig(linear="packed")
    half = load(small, packed, packed)
    assert not layers(half, nn.Linear)
    for found, expected in encoded(small, half):
        assert found.dtype == torch.float32
        assert distance(found, expected) < 2e-5


@pytest.mark.long
def test_embeddings_of_8_bit_layers_are_near(small: Small) -> None:
    int8 = PartConfig(linear="int8")
    half = load(small, int8, int8)
    # Rows of other lengths than multiples of 4 stay as they are.
    is_rounded = any(half.get_submodule(name).in_features % 4 == 0 for name in layers(half, KernelLinear))
    for found, expected in encoded(small, half):
        assert found.dtype == torch.float32
        assert distance(found, expected) < (0.15 if is_rounded else 2e-5)
        assert distance(found, expected) > 1e-3 or not is_rounded


@pytest.mark.long
def test_embeddings_of_a_bfloat16_tower_are_near_and_have_the_projectors_dtype(
    small: Small, plain: PreTrainedModel
) -> None:
    half = load(small, tower=PartConfig(dtype=torch.bfloat16))
    for (name, value), whole in zip(half.named_parameters(), plain.parameters(), strict=True):
        # Neither is rounded on the way.
        assert torch.equal(value, whole if is_projector(small, name) else whole.bfloat16()), name
        assert value.dtype == (torch.float32 if is_projector(small, name) else torch.bfloat16), name
    for found, expected in encoded(small, half):
        assert found.dtype == (torch.bfloat16 if small.model_type in WITHOUT_PROJECTOR else torch.float32)
        if small.model_type == "chameleon":  # whose embeddings are those of a few other tokens, then
            same = (found.float() - expected).norm(dim=-1) < 0.01 * expected.norm(dim=-1)
            assert same.float().mean() > 0.7
        else:
            assert 1e-3 < distance(found, expected) < 0.1


@pytest.mark.long
def test_embeddings_of_a_bfloat16_projector_are_near_and_bfloat16(small: Small) -> None:
    half = load(small, projector=PartConfig(dtype=torch.bfloat16))
    for found, expected in encoded(small, half):
        if small.model_type in WITHOUT_PROJECTOR:
            assert torch.equal(found, expected)
        else:
            assert found.dtype == torch.bfloat16
            assert 1e-4 < distance(found, expected) < 0.1


@pytest.mark.long
def test_a_dtype_changes_only_buffers_that_are_weights(small: Small, plain: PreTrainedModel) -> None:
    """Rotary frequencies in bfloat16 would turn far patches by the wrong angle."""
    bfloat16 = PartConfig(dtype=torch.bfloat16)
    buffers, weights = dict(plain.named_buffers()), plain.state_dict()
    for name, value in load(small, bfloat16, bfloat16).named_buffers():
        is_weight = name in weights and value.is_floating_point()
        # Gemma 3n's tower of sounds makes its own in the dtype of the model.
        is_weight |= "audio_tower" in name and value.dtype is torch.bfloat16
        assert torch.equal(value, buffers[name].bfloat16() if is_weight else buffers[name]), name


@pytest.mark.parametrize("form", ["packed", "int8"])
def test_each_part_has_its_own_form(small: Small, plain: PreTrainedModel, form: LinearForm) -> None:
    config = PartConfig(linear=form)
    linear = layers(plain, nn.Linear)
    assert linear or small.model_type in WITHOUT_LINEAR_LAYERS
    in_projector = {name for name in linear if is_projector(small, name)}
    assert layers(load(small, tower=config), KernelLinear) == linear - in_projector
    assert layers(load(small, projector=config), KernelLinear) == in_projector


def test_8_bit_layers_are_stored_in_8_bits(small: Small) -> None:
    int8 = PartConfig(linear="int8")
    half = load(small, int8, int8)
    names = layers(half, KernelLinear)
    assert names or small.model_type in WITHOUT_LINEAR_LAYERS
    layouts = [half.get_submodule(name).packed_weight.layout for name in names]
    assert {layout.form for layout in layouts if layout.in_features % 4 == 0} <= {"int8"}
