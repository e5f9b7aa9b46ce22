"""Tells the log how far a checkpoint is downloaded and loaded.

transformers and huggingface_hub draw bars with tqdm, for a terminal that a replica lacks."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.std import tqdm

logger = logging.getLogger(f"ray.serve.{__name__}")

_SECONDS = 5.0
"""Before the first line of a bar, and between two."""
_FORM = "{desc}: {percentage:.0f}% of {total_fmt}, {remaining} left"
_VARIABLE = "TQDM_POSITION"
"""At -1, huggingface_hub has bars without a terminal, too."""


@contextmanager
def told_progress() -> Iterator[None]:
    """Makes lines of the log of all bars in the block."""
    display, position = tqdm.display, os.environ.pop(_VARIABLE, None)
    tqdm.display, os.environ[_VARIABLE] = _tell, "-1"
    try:
        yield
    finally:
        tqdm.display = display
        os.environ.pop(_VARIABLE, None)
        if position is not None:
            os.environ[_VARIABLE] = position


def _tell(bar: Any, *_: object, **__: object) -> None:
    """Stands for `tqdm.display`, which tqdm calls ten times a second."""
    told: dict[str, Any] = bar.format_dict
    if told["total"] and told["elapsed"] - getattr(bar, "told_after", 0.0) >= _SECONDS:
        bar.told_after = told["elapsed"]
        logger.info("%s", bar.format_meter(**(told | {"bar_format": _FORM})))
