"""Places tower and projector of a vision half, each with its own device, dtype and form of linear layers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from raylens.cpu_kernels.library import kernel_library
from raylens.encoder.config import PartConfig
from raylens.encoder.models.family import VisionFamily
from raylens.modeling.half_model import is_within
from raylens.modeling.kernel_mlp import fuse_mlps
from raylens.modeling.kernel_norm import replace_norms
from raylens.modeling.kernel_rotary import rotate_by_kernels
from raylens.modeling.packed_linear import Precision, has_kernel_layers, pack_linear_layers
from raylens.modeling.packed_patches import pack_patch_convolutions
from raylens.modeling.stored_weights import convert_weights

_FLOAT32_ARGUMENTS = frozenset({"interp_weights"})
"""Arguments that stay float32 with any dtype of the tower: the interpolation weights of position embeddings."""

IsIncluded = Callable[[str], bool]
"""Returns whether the module, parameter or buffer of a name belongs to the part."""


def place_parts(model: nn.Module, family: VisionFamily, tower: PartConfig, projector: PartConfig) -> None:
    """Applies the settings of both parts to `model`, in place.

    Each part then converts its inputs to its own device and dtype."""

    def is_projector(name: str) -> bool:
        return is_within(name, family.projector)

    if not family.tower:
        # Some towers read the weights of their linear layers themselves, and nobody knows of a found one.
        tower, projector = (replace(part, linear="plain") for part in (tower, projector))
    _place(model, tower, lambda name: not is_projector(name))
    _place(model, projector, is_projector)
    # After `_place`: a packed or quantised layer is a new module without the hooks of the replaced one.
    _convert_inputs(model.get_submodule(family.tower), tower)
    for module in _entrances(model, family.projector):
        _convert_inputs(module, projector)


def _place(model: nn.Module, part: PartConfig, is_included: IsIncluded) -> None:
    if part.linear != "plain":
        precision: Precision | None = "int8" if part.linear == "int8" else None
        pack_linear_layers(model, part.dtype, is_included, lambda name: precision, lambda name: part.exact)
    convert_weights(model, part.device, part.dtype, is_included)
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if is_included(name):
            # A buffer in the checkpoint is a weight like any other. Other buffers keep transformers' dtype, because
            # rotary frequencies must be float32.
            dtype = part.dtype if name in saved and buffer.is_floating_point() else buffer.dtype
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, buffer.to(part.device, dtype))
    if part.linear != "plain":
        fuse_mlps(model, is_included)
        pack_patch_convolutions(model, is_included)
        library = kernel_library() if has_kernel_layers(part.dtype) else None
        if library is not None:
            replace_norms(library, model, is_included)
            rotate_by_kernels(library, model, is_included)


def _entrances(model: nn.Module, paths: tuple[str, ...]) -> Iterator[nn.Module]:
    """Yields the modules at the paths, and for a module list each of its modules. Skips parameters, which have no
    inputs."""
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
            # A copy from unpinned memory would make the host wait for all queued work of the GPU.
            return value.pin_memory().to(part.device, dtype, non_blocking=True)
        return value.to(part.device, dtype)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(convert, args)), {name: convert(value, name) for name, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)
