"""What a request weighs, and what has been taken of a budget: in requests, bytes, pixels and tokens."""

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
        return type(self)(*map(add, _amounts(self), _amounts(other)))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(sub, _amounts(self), _amounts(other)))

    def __floordiv__(self, number: int) -> Self:
        return type(self)(*(one // number for one in _amounts(self)))

    def exceeded_resource(self, limit: Self) -> str | None:
        """Returns the name of the first resource of which there is more than `limit`, or None."""
        return next((name for name in RESOURCES if getattr(self, name) > getattr(limit, name)), None)


RESOURCES = tuple(one.name for one in fields(Weight))
_amounts = attrgetter(*RESOURCES)  # dataclasses.astuple takes almost thirty times as long
