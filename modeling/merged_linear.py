"""Merges linear layers with the same input into one product on a GPU.

Usually these are the layers of queries, keys and values, and an MLP's gate and up layers. A trial run of the model
finds them, independent of their names."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


class MergedLinear(nn.Module):
    """Replaces the first of several layers. It computes the outputs of all and keeps the later ones."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.in_features, self.out_features = layers[0].in_features, layers[0].out_features
        self.weight = nn.Parameter(torch.cat([layer.weight.data for layer in layers]), requires_grad=False)
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.later: list[torch.Tensor] = []
        """The outputs that the later layers have not taken yet, in call order."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        output = nn.functional.linear(input, self.weight, self.bias)
        own: torch.Tensor
        own, *self.later = torch.split(output, self.sizes, dim=-1)
        return own


class LaterPart(nn.Module):
    """Replaces a later layer and returns the output that the first has computed for it."""

    def __init__(self, layer: nn.Linear, first: MergedLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._first = [first]  # in a list, so that it is no submodule of this layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        return self._first[0].later.pop(0)


def merge_linear_layers(model: nn.Module, run: Callable[[], object]) -> None:
    """Merges plain linear layers of the model, in place, if they have one parent and are called consecutively with the
    same tensor. `run`: runs the model once, with any input."""
    names = {module: name for name, module in model.named_modules()}
    for layers in [group for group in _groups(names, run) if len(group) > 1]:
        first = MergedLinear(layers)
        model.set_submodule(names[layers[0]], first)
        for layer in layers[1:]:
            model.set_submodule(names[layer], LaterPart(layer, first))


def _groups(names: dict[nn.Module, str], run: Callable[[], object]) -> Iterator[list[nn.Linear]]:
    calls = _calls(names, run)
    times = Counter(layer for layer, _ in calls)
    group: list[nn.Linear] = []
    group_input: torch.Tensor | None = None
    for layer, tensor in calls:
        if not (group and tensor is group_input and _go_together(names, group[0], layer)):
            yield group
            group, group_input = [], tensor
        if type(layer) is nn.Linear and times[layer] == 1:
            group.append(layer)
    yield group


def _calls(names: Iterable[nn.Module], run: Callable[[], object]) -> list[tuple[nn.Linear, torch.Tensor]]:
    """Returns the called linear layers in order, each with its input."""
    calls: list[tuple[nn.Linear, torch.Tensor]] = []

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append((layer, inputs[0]))

    hooks = [module.register_forward_pre_hook(note) for module in names if isinstance(module, nn.Linear)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _go_together(names: dict[nn.Module, str], one: nn.Linear, other: nn.Linear) -> bool:
    return (
        type(one) is type(other) is nn.Linear
        and names[one].rpartition(".")[0] == names[other].rpartition(".")[0]
        and one.weight.dtype == other.weight.dtype
        and (one.bias is None) == (other.bias is None)
    )
