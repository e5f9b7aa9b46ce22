"""One reading of the application's metrics: the value of each series at that time, or its growth between two times."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "raylens_"
_GROWING = ("_total", "_bucket", "_sum", "_count")
_NODE = "node"

Labels = frozenset[tuple[str, str]]


class MetricsPage:
    """The series of one page by the name of their sample, without `raylens_`, and by their labels."""

    def __init__(self, series: Mapping[str, Mapping[Labels, float]]) -> None:
        self._series = series

    @classmethod
    def of_text(cls, text: str) -> "MetricsPage":
        """Reads Prometheus' text format. Raises ValueError for a page in another form."""
        return cls.of_families(text_string_to_metric_families(text))

    @classmethod
    def of_families(cls, families: Iterable[Metric]) -> "MetricsPage":
        """Adds the series up that have the same labels, as those of two sources may."""
        series: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        for family in families:
            if family.name.startswith(_PREFIX):
                for sample in family.samples:
                    series[sample.name.removeprefix(_PREFIX)][frozenset(sample.labels.items())] += sample.value
        return cls(series)

    def since(self, earlier: "MetricsPage") -> "MetricsPage":
        """Returns how much each counter and each histogram grew.

        One that is smaller than before began anew, from 0. What a node counts that is not on the earlier page did not
        grow: the node may only have been silent for a while."""
        known = earlier.nodes()
        grown: dict[str, dict[Labels, float]] = {}
        for name, now in self._series.items():
            if name.endswith(_GROWING):
                before = earlier._series.get(name, {})
                grown[name] = {
                    labels: _growth(before.get(labels, 0.0), value)
                    for labels, value in now.items()
                    if dict(labels).get(_NODE) in known
                }
        return MetricsPage(grown)

    def nodes(self) -> set[str | None]:
        return {dict(labels).get(_NODE) for series in self._series.values() for labels in series}

    def has(self, name: str, **labels: str) -> bool:
        return any(True for _ in self._matching(name, labels))

    def sum(self, name: str, **labels: str) -> float:
        """Returns the sum of all series that have these labels among theirs."""
        return sum(value for _, value in self._matching(name, labels))

    def values(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Returns the labels and the value of each of these series."""
        return [(dict(own), value) for own, value in self._matching(name, labels)]

    def sums(self, name: str, label: str) -> dict[str, float]:
        """Returns the sums by the value of `label`."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self._series.get(name, {}).items():
            sums[dict(labels).get(label, "")] += value
        return dict(sums)

    def quantile(self, name: str, share: float) -> float | None:
        """Returns the value below which `share` of a histogram's observations are, as Prometheus' histogram_quantile
        estimates it: evenly spread in each bucket, at most the last finite bound. None without an observation."""
        buckets = sorted((float(bound), count) for bound, count in self.sums(f"{name}_bucket", "le").items())
        total = buckets[-1][1] if buckets else 0.0
        if not total:
            return None
        lower, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= share * total and count > below:
                if math.isinf(bound):
                    return lower
                return lower + (bound - lower) * (share * total - below) / (count - below)
            lower, below = bound, count
        raise AssertionError("the last bucket has all observations")

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterable[tuple[Labels, float]]:
        return ((own, value) for own, value in self._series.get(name, {}).items() if own >= labels.items())


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now
