"""What came of a simulated load."""

from collections.abc import Sequence
from dataclasses import dataclass

STAGES = ("ingress", "shared", "preprocess", "encode", "generate")


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the percentile by linear interpolation between the two nearest of the sorted values. Raises ValueError
    where there are none."""
    if not values:
        raise ValueError("no values have a percentile")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Window:
    """Which requests count: those between shares of all. The first meet an empty system, and behind the last nothing
    comes."""

    begin: float = 0.0
    end: float = 1.0

    def of(self, count: int) -> tuple[int, int]:
        """Returns the counted requests of `count` as [first, last), one at least."""
        first = min(int(count * self.begin), count - 1)
        return first, max(first + 1, round(count * self.end))


WHOLE = Window()


@dataclass(frozen=True, slots=True)
class BusySeconds:
    """Processor seconds: of each stage, those of the busiest thread of each replica, and those of all processes."""

    stages: dict[str, float]
    everything: float

    def since(self, before: "BusySeconds") -> "BusySeconds":
        stages = {stage: seconds - before.stages[stage] for stage, seconds in self.stages.items()}
        return BusySeconds(stages, self.everything - before.everything)


class Ongoing:
    """Counts the requests that have come and not ended, over time."""

    def __init__(self) -> None:
        self._count = 0
        self._changed_at = 0.0
        self._request_seconds = 0.0

    def change(self, by: int, now: float) -> None:
        self._request_seconds += self._count * (now - self._changed_at)
        self._count += by
        self._changed_at = now

    def mean(self, seconds: float) -> float:
        """Returns how many there were on average, in `seconds` from the first arrival to the last end."""
        return self._request_seconds / seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of the requests of a load. Times are in seconds. `utilisation`: of each stage, the share of the time in
    which a replica's busiest thread computes. `mean_ongoing`: requests in the system, on average over time."""

    requests_per_second: float
    tokens_per_second: float
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float | None
    tpot_p95: float | None
    utilisation: dict[str, float]
    cores_busy: float
    mean_ongoing: float
    mean_latency: float
    mean_batch: float
    """Sequences that decode in a step of Generate."""

    @property
    def limiting_stage(self) -> str:
        return max(self.utilisation, key=lambda stage: self.utilisation[stage])
