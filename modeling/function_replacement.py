"""Lets a module's forward call other functions in place of those of its Python module."""

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn


def forward_of(module: nn.Module) -> Any:
    """Returns the forward of the module's class, without its decorators."""
    return inspect.unwrap(type(module).forward)


def replace_functions(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Replaces functions, by their names in the Python module, in this module alone, whose forward loses its
    decorators."""
    forward = forward_of(module)
    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, **functions},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(changed, module)
