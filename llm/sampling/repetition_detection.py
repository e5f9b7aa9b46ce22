"""Finds out that an answer repeats itself without an end, as answers about documents sometimes do."""

from dataclasses import dataclass

import numpy as np

from raylens.llm.sampling import bounds
from raylens.preprocess.schema import InvalidRequestError


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """A run of `min_pattern_size` to `max_pattern_size` tokens that comes `min_count` times in a row is a repetition.
    Raises InvalidRequestError with the field and its limit."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        limits = {
            "max_pattern_size": (1, bounds.MAX_PATTERN_SIZE),
            "min_pattern_size": (1, self.max_pattern_size),
            "min_count": (2, bounds.MAX_PATTERN_COUNT),
        }
        for name, (least, most) in limits.items():
            if not least <= (value := getattr(self, name)) <= most:
                reason = f"must be between {least} and {most}, got {value}"
                raise InvalidRequestError(reason, field=f"repetition_detection.{name}")


class RepetitionDetector:
    """Follows one answer. A token takes the same time however long the answer is."""

    def __init__(self, wanted: RepetitionDetection) -> None:
        self._sizes = np.arange(wanted.min_pattern_size, wanted.max_pattern_size + 1)
        self._runs = np.zeros(len(self._sizes), dtype=np.int64)
        """For each size, how many tokens in a row were equal to the token that far before."""
        self._enough = self._sizes * (wanted.min_count - 1)
        self._last = np.full(wanted.max_pattern_size, -1, dtype=np.int64)  # the newest first

    def append(self, token_id: int) -> bool:
        """Takes the next token. Returns whether the answer ends in a repetition."""
        self._runs = np.where(self._last[self._sizes - 1] == token_id, self._runs + 1, 0)
        self._last[1:] = self._last[:-1]
        self._last[0] = token_id
        return bool((self._runs >= self._enough).any())
