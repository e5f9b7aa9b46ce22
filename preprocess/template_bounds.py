"""Bounds the numbers and texts that a chat template computes.

A time limit cannot end a single multiplication, and `'a' * 10**10` takes all memory. transformers compiles templates in
jinja's sandbox, which bounds `range` alone."""

from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MAX_LENGTH = 10_000_000
"""The most characters or elements of a repetition, and the most bits of a product or power."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that does not repeat, multiply or raise to a power beyond the bound: it raises OverflowError, as
    `range` does."""

    intercepted_binops = frozenset({"*", "**"})  # jinja computes none of these when it compiles a template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MAX_LENGTH:
            raise OverflowError(f"the result of {operator} in a chat template is too large")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Returns the length of a repetition, the bits of a product or power of whole numbers, and 0 for anything else."""
    numbers = [one for one in (left, right) if isinstance(one, int)]
    lengths = [len(one) for one in (left, right) if isinstance(one, str | list | tuple)]
    if len(numbers) == 2:
        return int(left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length())
    return numbers[0] * lengths[0] if numbers and lengths else 0


def bound_templates() -> None:
    """Has transformers compile every further chat template in the bounded sandbox."""
    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
