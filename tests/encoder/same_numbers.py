"""Equality of what is computed in batches of other sizes.

On most processors a row of a product does not depend on how many rows there are, and then batches change no bit. On
Intel's with wide registers, the library has other code for products of one or two rows: there a row may differ in its
last bits. The tests ask for equality to the bit wherever the processor gives it."""

from functools import cache

import torch

_SHAPES = [(16, 32), (32, 64), (64, 64), (64, 128), (24, 48)]
_NUMBERS_OF_ROWS = [1, 2, 3, 4, 8, 16, 17, 49, 64, 100]
_ROUNDING = 1e-5


@cache
def rows_stand_alone() -> bool:
    """Whether a row of a product is the same to the bit, however many rows there are."""
    drawn = torch.Generator().manual_seed(0)
    for size, width in _SHAPES:
        rows, weight = torch.randn(200, size, generator=drawn), torch.randn(width, size, generator=drawn)
        whole = torch.nn.functional.linear(rows, weight)
        for number in _NUMBERS_OF_ROWS:
            if not torch.equal(torch.nn.functional.linear(rows[:number], weight), whole[:number]):
                return False
    return True


def is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both are equal to the bit, or where the processor does not give that, but for rounding."""
    if rows_stand_alone():
        return torch.equal(found, expected)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=_ROUNDING, atol=_ROUNDING)
