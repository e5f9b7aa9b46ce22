"""The modules of a model that another one can replace, by `set_submodule`."""

from torch import nn


def submodules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns all modules but the model itself, by name. Nothing holds the model that could hold its replacement."""
    return [(name, module) for name, module in model.named_modules() if name]
