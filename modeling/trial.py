"""Whether kernels compute what a part of a model does, on random numbers."""

from collections.abc import Callable
from typing import Any

import torch

_TOLERANCE = 1e-4
"""Relative to the largest number. Rounding causes far less, another computation far more."""


@torch.inference_mode()
def agree(own: Callable[..., Any], part: Callable[..., Any], *shapes: tuple[int, ...]) -> bool:
    """Returns whether `own` and `part` return the same tensor, or tuple of tensors, for random tensors of the `shapes`.
    A part that raises an error expects something else."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    try:
        expected = _tensors(part(*given))
    except Exception:
        return False
    found = _tensors(own(*given))
    return len(found) == len(expected) and all(map(_is_close, found, expected))


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return expected.shape == found.shape and bool((expected - found).abs().max() <= _TOLERANCE * expected.abs().max())
