"""Every metric that deployments/metrics/definitions.py defines, and the names under which Prometheus has it."""

import inspect
from collections.abc import Iterator

from deployments.metrics.instruments import PREFIX, Counter, Gauge, Histogram

from deployments.metrics import definitions

Instrument = Counter | Gauge | Histogram

_OF_ALL = {"application", "deployment", "node"}
PROCESS_LABELS = {"counter": _OF_ALL, "histogram": _OF_ALL, "gauge": _OF_ALL | {"replica"}}
"""Labels of every series besides the metric's own tags."""


def defined() -> list[Instrument]:
    """Every metric once, also those that several processes record."""
    found: dict[str, Instrument] = {}
    for cls in vars(definitions).values():
        is_own = inspect.isclass(cls) and cls.__module__ == definitions.__name__
        if is_own and not any(one.default is one.empty for one in inspect.signature(cls).parameters.values()):
            found |= {one.name: one for one in _instruments(cls())}
    return list(found.values())


def _instruments(owner: object) -> Iterator[Instrument]:
    for value in vars(owner).values():
        if isinstance(value, Instrument):
            yield value
        elif type(value).__module__ == definitions.__name__:
            yield from _instruments(value)


def exported_names(metric: Instrument) -> set[str]:
    name = PREFIX + metric.name
    if metric.kind == "counter":
        return {f"{name.removesuffix('_total')}_total"}
    return {f"{name}_{suffix}" for suffix in ("bucket", "sum", "count")} if metric.kind == "histogram" else {name}


def labels(metric: Instrument) -> set[str]:
    """The labels of its series."""
    return PROCESS_LABELS[metric.kind] | set(metric.tags) | ({"le"} if metric.kind == "histogram" else set())
