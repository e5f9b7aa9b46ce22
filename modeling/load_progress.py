"""Tells by lines how far a checkpoint is downloaded, loaded or converted.

transformers, huggingface_hub and Raylens draw bars with tqdm, for a terminal that a replica and a pipe lack."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

from tqdm.std import tqdm

logger = logging.getLogger(f"ray.serve.{__name__}")

_FIRST_SECONDS, _SECONDS = 2.0, 5.0
"""Before the first line of a bar, and between two."""
_FORM = "{desc}: {n_fmt} of {total_fmt}{bytes}, {elapsed_s:.0f} s, {remaining} left"
_VARIABLE = "TQDM_POSITION"
"""At -1, huggingface_hub has bars without a terminal, too."""


@contextmanager
def told_progress(tell: Callable[[str], object] = logger.info) -> Iterator[None]:
    """Makes lines of all bars in the block, by default of the log."""
    display, position = tqdm.display, os.environ.pop(_VARIABLE, None)
    tqdm.display, os.environ[_VARIABLE] = partialmethod(_tell, tell), "-1"
    try:
        yield
    finally:
        tqdm.display = display
        os.environ.pop(_VARIABLE, None)
        if position is not None:
            os.environ[_VARIABLE] = position


def _tell(bar: Any, tell: Callable[[str], object], *_: object, **__: object) -> None:
    """Stands for `tqdm.display`, which tqdm calls ten times a second."""
    told: dict[str, Any] = bar.format_dict
    if told["total"] and told["elapsed"] >= getattr(bar, "told_at", _FIRST_SECONDS):
        bar.told_at = told["elapsed"] + _SECONDS
        unit = "B" if told["unit"] == "B" else ""
        tell(bar.format_meter(**(told | {"bar_format": _FORM.replace("{bytes}", unit)})))
