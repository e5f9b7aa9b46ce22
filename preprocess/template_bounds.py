"""Bounds the numbers and texts that a chat template computes.

A time limit cannot interrupt a single multiplication, and `'a' * 10**10` exhausts memory. transformers compiles
templates in jinja's sandbox, which bounds `range` only."""

from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MAX_LENGTH = 10_000_000
"""The most characters or elements of a repetition, and the most bits of a product or power."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with bounded repetitions, products and powers. Beyond the bound it raises OverflowError, as `range`
    does."""

    intercepted_binops = frozenset({"*", "**"})  # jinja does not constant-fold intercepted operators

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MAX_LENGTH:
            raise OverflowError(f"the result of {operator} in a chat template is too large")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Returns the length of a repetition, the bits of an integer product or power, and 0 for anything else."""
    numbers = [one for one in (left, right) if isinstance(one, int)]
    lengths = [len(one) for one in (left, right) if isinstance(one, str | list | tuple)]
    if len(numbers) == 2:
        return int(left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length())
    return numbers[0] * lengths[0] if numbers and lengths else 0


def bound_templates() -> None:
    """Makes transformers compile all later chat templates in the bounded sandbox."""
    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
