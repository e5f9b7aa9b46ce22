"""Loads weights as their files have them: mapped, not copied, in their own dtype or in 8 or 4 bits.

transformers' loader converts each weight to the model's dtype. For a model of bfloat16 that computes in float32, this
would take twice the file's size. Here the model's parameters get the dtypes of the files before it reads them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from raylens.modeling.quantized_checkpoint import DTYPES, QuantizedWeight, Settings, find_quantized
from raylens.modeling.submodules import submodules


@dataclass(frozen=True, slots=True)
class Target:
    """The use of a weight in a file, `stored`. `name`: the model's weight that it fills, alone or as a part.
    `converter` and `pattern`: of transformers' conversion, if it has one."""

    stored: Any
    name: str
    pattern: str | None
    converter: WeightConverter | None


class QuantizedLinear(nn.Module):
    """Stands for a Linear with a quantized `weight` of a file, until it is packed or dequantized. Computes nothing."""

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def dequantized(self) -> nn.Linear:
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight[:], requires_grad=False)
        linear.register_parameter("bias", self.bias)
        return linear


def stored_class(
    model_class: type[PreTrainedModel], quantization: Settings | None, *, keeps_forms: bool, maps_files: bool = True
) -> type[PreTrainedModel]:
    """Returns a subclass of `model_class` whose `from_pretrained` reads safetensors files, quantized weights too.

    With `keeps_forms` it leaves matrices in the dtype of their file, and linear layers quantized. Otherwise all weights
    get the model's dtype. `maps_files`: reading some columns of a mapped weight would load all its pages."""

    class Stored(model_class):
        # transformers calls this after it has built the model on the meta device and found the checkpoint's files.
        @staticmethod
        def _load_pretrained_model(
            model: PreTrainedModel, state_dict: dict[str, Any] | None, files: list[str], load_config: Any, **_: Any
        ) -> tuple[Any, Any]:
            assert state_dict is None
            slices = open_weights(files, "mmap" if maps_files else "pread")
            if quantization is not None:
                # Read and not mapped, because nothing would take their pages out of this process's memory.
                plain, quantized = find_quantized(open_weights(files, "pread"), quantization)
                slices = {key: slices[key] for key in plain} | quantized
            if keeps_forms:
                expected = model.state_dict()
                targets = find_targets(model, slices, load_config.weight_mapping or [], expected)
                for key, target in targets.items():
                    if target.name in expected and target.converter is None and _keep(model, target):
                        del slices[key]
            return model_class._load_pretrained_model(model, slices, None, load_config)  # type: ignore[no-any-return]

    # transformers looks up its renamings of checkpoint keys by module and name of the class.
    Stored.__module__, Stored.__name__ = model_class.__module__, model_class.__name__
    return Stored


def convert_weights(
    model: nn.Module, device: str, dtype: torch.dtype, is_included: Callable[[str], bool] = lambda name: True
) -> None:
    """Gives the weights of a model that are as stored, and those of other dtypes, this dtype and device, in place. No
    weight maps a file afterwards. `is_included`: returns whether to convert the weight or layer of a name."""
    for name, module in submodules(model):
        if type(module) is QuantizedLinear and is_included(name):
            model.set_submodule(name, module.dequantized())
    for name, parameter in model.named_parameters():
        if is_included(name):
            parameter.data = parameter.data.to(device, dtype, copy=True)


def open_weights(files: Iterable[str], backend: str) -> dict[str, Any]:
    """Returns the weights of safetensors files, unread. `backend`: safetensors' own, `mmap` or `pread`."""
    slices: dict[str, Any] = {}
    for file in files:
        opened: Any = safe_open(file, framework="pt", backend=backend)
        slices |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 - no iterator
    return slices


def find_targets(
    model: PreTrainedModel, slices: Mapping[str, Any], mapping: list[Any], expected: Mapping[str, torch.Tensor]
) -> dict[str, Target]:
    """Returns what transformers' loader makes of each of the `slices`. `mapping`: its `weight_mapping`. `expected`: the
    model's weights."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets = {}
    # In transformers' own order, because some renamings depend on it.
    for key in sorted(slices, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, expected)
        converter = by_pattern[pattern] if pattern is not None and name in expected else None
        targets[key] = Target(slices[key], name, pattern, converter)
    return targets


def _keep(model: PreTrainedModel, target: Target) -> bool:
    """Prepares the model for a weight in its stored form. Returns whether that took the weight."""
    path, _, leaf = target.name.rpartition(".")
    module, stored = model.get_submodule(path), target.stored
    parameter = getattr(module, leaf)
    if isinstance(stored, QuantizedWeight):
        is_taken = type(module) is nn.Linear and leaf == "weight" and tuple(parameter.shape) == stored.shape
        if is_taken:
            model.set_submodule(path, QuantizedLinear(stored, module.bias))
        return is_taken
    dtype = DTYPES.get(stored.get_dtype())
    if parameter.ndim > 1 and parameter.is_floating_point() and dtype is not None:
        parameter.data = parameter.data.to(dtype)
    return False
