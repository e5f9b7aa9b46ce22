"""Repetitions at the end of an answer, the same ones that a comparison of the whole runs finds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.llm.sampling.repetition_detection import RepetitionDetection, RepetitionDetector
from raylens.preprocess.schema import InvalidRequestError


def repeats(answer: list[int], wanted: RepetitionDetection) -> bool:
    for size in range(wanted.min_pattern_size, wanted.max_pattern_size + 1):
        tail = answer[-size * wanted.min_count :]
        if len(tail) == size * wanted.min_count and tail == tail[:size] * wanted.min_count:
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(2, 4), st.lists(st.integers(0, 2), max_size=40))
def test_it_finds_what_a_comparison_of_the_runs_finds(least: int, more: int, count: int, answer: list[int]) -> None:
    wanted = RepetitionDetection(least + more, least, count)
    detector = RepetitionDetector(wanted)
    for end, token_id in enumerate(answer, 1):
        assert detector.append(token_id) == repeats(answer[:end], wanted), answer[:end]


@pytest.mark.parametrize(
    ("values", "field"), [((0,), "max_pattern_size"), ((3, 4), "min_pattern_size"), ((3, 1, 1), "min_count")]
)
def test_senseless_settings_are_refused_by_name(values: tuple[int, ...], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"repetition_detection\.{field}: must be between"):
        RepetitionDetection(*values)
