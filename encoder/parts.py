"""The tower and the projector of a vision half: each on a device, in a dtype and with linear layers of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from encoder.config import PartConfig
from encoder.models.family import VisionFamily
from modeling.half_model import is_within
from modeling.packed_linear import pack_linear_layers
from modeling.packed_patches import pack_patch_convolutions
from modeling.quantized_linear import quantize_linear_layers

_FLOAT32_ARGUMENTS = frozenset({"interp_weights"})
"""What a tower computes in float32 in any dtype: how much of each neighbour a patch's place takes."""

IsIncluded = Callable[[str], bool]
"""Whether the module, parameter or buffer with this name is one of a part's."""


def place_parts(model: nn.Module, family: VisionFamily, tower: PartConfig, projector: PartConfig) -> None:
    """Brings both parts of `model` to their settings, in place. What passes from one to the other is brought to the
    receiver's device and dtype."""

    def is_projector(name: str) -> bool:
        return is_within(name, family.projector)

    _place(model, tower, lambda name: not is_projector(name))
    _place(model, projector, is_projector)
    # Behind that, for layers of other forms are other modules.
    _convert_inputs(model.get_submodule(family.tower), tower)
    for module in _entrances(model, family.projector):
        _convert_inputs(module, projector)


def _place(model: nn.Module, part: PartConfig, is_included: IsIncluded) -> None:
    for name, parameter in model.named_parameters():
        if is_included(name):
            parameter.data = parameter.data.to(part.device, part.dtype)
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if is_included(name):
            # What a checkpoint holds is a weight like any other. The rest stays in the dtype in which transformers made
            # it: rotary frequencies have to be float32.
            dtype = part.dtype if name in saved and buffer.is_floating_point() else buffer.dtype
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, buffer.to(part.device, dtype))
    if part.linear == "packed":
        pack_linear_layers(model, is_included)
        pack_patch_convolutions(model, is_included)
    elif part.linear == "int8":
        quantize_linear_layers(model, is_included)


def _entrances(model: nn.Module, paths: tuple[str, ...]) -> Iterator[nn.Module]:
    """The modules at the paths, each of a list apart; what is a parameter is never called."""
    for path in paths:
        owner, _, leaf = path.rpartition(".")
        member = getattr(model.get_submodule(owner), leaf)
        if isinstance(member, nn.ModuleList):
            yield from member
        elif isinstance(member, nn.Module):
            yield member


def _convert_inputs(module: nn.Module, part: PartConfig) -> None:
    is_on_gpu = torch.device(part.device).type == "cuda"

    def convert(value: Any, name: str = "") -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        keeps_dtype = not value.is_floating_point() or name in _FLOAT32_ARGUMENTS
        dtype = value.dtype if keeps_dtype else part.dtype
        if is_on_gpu and value.device.type == "cpu":
            # Memory that is not pinned would be copied only behind all that the GPU was given before.
            return value.pin_memory().to(part.device, dtype, non_blocking=True)
        return value.to(part.device, dtype)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(convert, args)), {name: convert(value, name) for name, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)
