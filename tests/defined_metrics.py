"""Every metric that deployments/metrics/definitions.py defines, and how Prometheus has it."""

from collections.abc import Iterator
from typing import Any

from raylens.deployments.metrics import definitions
from raylens.deployments.metrics.instruments import PREFIX, Instrument


def defined() -> dict[str, Instrument[Any]]:
    """Every metric by its name."""
    found: dict[str, Instrument[Any]] = {}
    owners = [
        definitions.ReplicaMetrics(),
        definitions.IngressMetrics(),
        definitions.ItemMetrics(),
        definitions.PreprocessMetrics(),
        definitions.EncodeMetrics(),
        definitions.GenerateMetrics(),
    ]
    for instrument in (one for owner in owners for one in _instruments_in(owner)):
        known = found.setdefault(instrument.name, instrument)
        assert (type(known), known.tags, known.unit) == (type(instrument), instrument.tags, instrument.unit)
    return found


def _instruments_in(owner: object) -> Iterator[Instrument[Any]]:
    for value in owner.values() if isinstance(owner, dict) else vars(owner).values():
        if isinstance(value, Instrument):
            yield value
        elif isinstance(value, dict) or type(value).__module__ == definitions.__name__:
            yield from _instruments_in(value)


def exported_names(metric: Instrument[Any]) -> set[str]:
    """The names of its series."""
    name = PREFIX + metric.name
    if metric.kind == "counter":
        return {f"{name.removesuffix('_total')}_total"}
    return {f"{name}_{suffix}" for suffix in ("bucket", "sum", "count")} if metric.kind == "histogram" else {name}


def labels(metric: Instrument[Any]) -> set[str]:
    """The labels of its series."""
    bound = ("le",) if metric.kind == "histogram" else ()
    return {*metric.process_labels, "node", *metric.tags, *bound}
