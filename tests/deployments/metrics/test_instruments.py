"""Histograms that observe many values at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylens.deployments.metrics.instruments import Histogram

BOUNDS = (0.01, 0.1, 1.0)


def observed(histogram: Histogram) -> dict[str, float]:
    """The value of each sample, by its name and its bucket's bound."""
    (metric,) = histogram.of().collect()
    return {sample.name + sample.labels.get("le", ""): sample.value for sample in metric.samples}


@given(st.lists(st.one_of(st.floats(0, 2), st.sampled_from(BOUNDS))))
def test_many_values_at_once_count_as_one_by_one(values: list[float]) -> None:
    at_once, one_by_one = (Histogram("s", BOUNDS, name, "") for name in ("seconds", "seconds"))
    at_once.of().observe_all(values)
    for value in values:
        one_by_one.observe(value)
    found, expected = observed(at_once), observed(one_by_one)
    for counts in found, expected:
        counts.pop("raylens_seconds_created", None)
    assert found == pytest.approx(expected)
