"""What a request weighs, and what has been taken of a budget: in requests, bytes, pixels and tokens."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import add, attrgetter, sub
from typing import Self


@dataclass(frozen=True, slots=True)
class Weight:
    """See `config.Budget` for the units."""

    requests: int = 0
    bytes: int = 0
    pixels: int = 0
    tokens: int = 0

    def __add__(self, other: Self) -> Self:
        return self._combined(add, other)

    def __sub__(self, other: Self) -> Self:
        return self._combined(sub, other)

    def __floordiv__(self, number: int) -> Self:
        return type(self)(*(one // number for one in _amounts(self)))

    def __bool__(self) -> bool:
        return any(_amounts(self))

    def excess_over(self, other: Self) -> Self:
        """Returns what is more than in `other`, 0 where it is less."""
        return self._combined(lambda one, limit: max(0, one - limit), other)

    def largest(self, other: Self) -> Self:
        """Returns the larger amount of each resource."""
        return self._combined(max, other)

    def where(self, asked: Self) -> Self:
        """Returns the amounts of those resources that something of is `asked`, 0 of the others."""
        return self._combined(lambda one, other: one if other else 0, asked)

    def exceeded_resource(self, limit: Self) -> str | None:
        """Returns the name of the first resource of which there is more than `limit`, or None."""
        excess = self.excess_over(limit)
        return next((one.name for one in fields(self) if getattr(excess, one.name)), None)

    def _combined(self, operation: Callable[[int, int], int], other: Self) -> Self:
        return type(self)(*map(operation, _amounts(self), _amounts(other)))


_amounts = attrgetter(*(one.name for one in fields(Weight)))  # dataclasses.astuple takes almost thirty times as long
