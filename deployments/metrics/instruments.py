"""Counters, gauges and histograms with the labels of the recording process.

They wrap prometheus_client's. In a replica, `deployments/metrics/recording.py` makes prometheus_client keep the values
in files of the node, so counts survive the process. All replicas of a deployment on one node share their counters and
histograms: a dead replica leaves no stale series, and no count decreases. Gauges end with their replica."""

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Sequence
from itertools import product
from typing import ClassVar, Generic, TypeVar

import prometheus_client
from prometheus_client.metrics import MetricWrapperBase

from raylens.deployments.metrics.recording import replica_labels

PREFIX = "raylens_"

MetricT = TypeVar("MetricT", bound=MetricWrapperBase)


class Instrument(Generic[MetricT]):
    """A metric `name` in `unit`, with `tags`."""

    kind: ClassVar[str]
    process_labels: ClassVar[tuple[str, ...]] = ("application", "deployment")

    def __init__(self, unit: str, name: str, description: str, *tags: str) -> None:
        self.name = name
        self.unit = unit
        self.description = description
        self.tags = tags
        own = replica_labels()
        self._own = tuple(getattr(own, label) for label in self.process_labels)
        self._series: dict[tuple[str, ...], MetricT] = {}
        self._metric = self._make((*self.process_labels, *self.tags))

    def of(self, **tags: str) -> MetricT:
        """Returns the series with these values of all tags."""
        return self._with(tuple(tags[tag] for tag in self.tags))

    def _make(self, labels: Sequence[str]) -> MetricT:
        raise NotImplementedError

    def _with(self, values: tuple[str, ...]) -> MetricT:
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._metric.labels(*self._own, *values)
        return series


class Cumulative(Instrument[MetricT]):
    """A metric that only grows. Each keyword argument is a tag with its known values. Their series start at 0, because
    Prometheus misses the first count of a series that starts with it."""

    def __init__(self, unit: str, name: str, description: str, **tags: Sequence[str]) -> None:
        super().__init__(unit, name, description, *tags)
        for values in product(*tags.values()):
            self._with(values)


class Counter(Cumulative[prometheus_client.Counter]):
    """A count. Its exported name ends in `_total`."""

    kind = "counter"

    def _make(self, labels: Sequence[str]) -> prometheus_client.Counter:
        return prometheus_client.Counter(PREFIX + self.name, self.description, labels, registry=None)

    def inc(self, amount: float = 1.0, **tags: str) -> None:
        self.of(**tags).inc(amount)


class Gauge(Instrument[prometheus_client.Gauge]):
    """A number that goes up and down. A replica's series starts when it is set, and ends with the replica."""

    kind = "gauge"
    process_labels = ("application", "deployment", "replica")

    def _make(self, labels: Sequence[str]) -> prometheus_client.Gauge:
        return prometheus_client.Gauge(PREFIX + self.name, self.description, labels, registry=None)

    def set(self, value: float, **tags: str) -> None:
        self.of(**tags).set(value)


class HistogramSeries(prometheus_client.Histogram):
    def observe_all(self, values: Sequence[float]) -> None:
        """Observes all values at a tenth of the cost of single calls."""
        self._sum.inc(sum(values))
        for index, number in Tally(bisect_left(self._upper_bounds, value) for value in values).items():
            self._buckets[index].inc(number)


class Histogram(Cumulative[HistogramSeries]):
    """A distribution. `buckets`: upper bounds, in `unit`."""

    kind = "histogram"

    def __init__(self, unit: str, buckets: Sequence[float], name: str, description: str, **tags: Sequence[str]) -> None:
        self.buckets = buckets
        super().__init__(unit, name, description, **tags)

    def _make(self, labels: Sequence[str]) -> HistogramSeries:
        return HistogramSeries(PREFIX + self.name, self.description, labels, buckets=self.buckets, registry=None)

    def observe(self, value: float, **tags: str) -> None:
        self.of(**tags).observe(value)
