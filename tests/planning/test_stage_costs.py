"""How benchmarks divide processor time among what it was taken for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.stage_costs import least_squares

FACTORS = st.lists(st.floats(0.1, 10), min_size=3, max_size=3)
ROWS = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.3], [1.0, 1.0, 2.1], [1.0, 0.0, 0.8], [1.0, 4.0, 0.3]]


@given(FACTORS)
@settings(max_examples=30, deadline=None)
def test_factors_of_exact_sums_are_found(factors: list[float]) -> None:
    values = [sum(each * count for each, count in zip(factors, row, strict=True)) for row in ROWS]
    assert least_squares(ROWS, values) == pytest.approx(factors, rel=1e-6)


def test_no_factor_is_below_zero() -> None:
    found = least_squares(ROWS, [5.0, 4.0, 3.0, 5.0, 2.0])
    assert min(found) >= 0
    assert found[0] > 0


def test_what_never_occurs_costs_nothing() -> None:
    assert least_squares([[1.0, 0.0], [2.0, 0.0]], [3.0, 6.0]) == pytest.approx([3.0, 0.0])


def test_values_of_zero_have_factors_of_zero() -> None:
    assert least_squares(ROWS, [0.0] * 5) == pytest.approx([0.0] * 3)
