"""Vectors and scores of prompts, and the relevance that follows from them."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from raylens.deployments.wire.stage_messages import GeneratedText

Rows = npt.NDArray[np.float32]
"""The vectors or scores of one prompt, (num_rows, size)."""


class PooledAnswer:
    """Collects the rows of all prompts of a request. `form` makes the API's answer of them, in the prompts' order."""

    def __init__(self, form: Callable[[Sequence[Rows]], BaseModel]) -> None:
        self._form = form
        self._rows: dict[int, Rows] = {}

    def add(self, pieces: Sequence[GeneratedText]) -> None:
        for piece in pieces:
            self._rows[piece.index] = np.stack([np.frombuffer(row, dtype="<f4") for row in piece.pooled])

    def whole(self) -> BaseModel:
        return self._form([self._rows[index] for index in sorted(self._rows)])


def similarity(query: Rows, document: Rows) -> float:
    """Returns the cosine of two vectors, from -1 to 1. Of several vectors each, it is ColBERT's late interaction: the
    sum, over the query's vectors, of the largest cosine with any of the document's
    (https://arxiv.org/abs/2004.12832)."""
    return float((_unit(query) @ _unit(document).T).max(axis=1).sum())


def probability(score: Rows) -> float:
    """Returns the probability of a logit."""
    return float(1.0 / (1.0 + np.exp(-score[0, 0].astype(np.float64))))


def probabilities(logits: Rows) -> list[float]:
    """Returns the softmax of the logits of all classes; of a single class, its probability alone."""
    if logits.shape[1] == 1:
        return [probability(logits)]
    exponentials = np.exp((logits[0] - logits[0].max()).astype(np.float64))
    shares: list[float] = (exponentials / exponentials.sum()).tolist()
    return shares


def shortened(rows: Rows, dimensions: int, *, normalizes: bool) -> Rows:
    """Returns the first numbers of each vector, with length 1 again if `normalizes`."""
    return _unit(rows[:, :dimensions]) if normalizes else rows[:, :dimensions]


def _unit(rows: Rows) -> Rows:
    unit: Rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit
