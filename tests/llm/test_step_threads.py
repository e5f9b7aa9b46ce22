"""The number of threads of a step follows what was fastest lately."""

from collections.abc import Callable

import pytest

from raylens.llm.step_threads import StepThreads

Seconds = Callable[[int], float]
"""How long a step takes with a number of threads."""


def run(threads: StepThreads, seconds: Seconds, num_steps: int = 400, num_rows: int = 8) -> list[int]:
    """Returns the numbers of threads that the steps had."""
    numbers = []
    for _ in range(num_steps):
        numbers.append(threads.next_number())
        threads.note(num_rows, seconds(numbers[-1]))
    return numbers


@pytest.mark.parametrize(("most", "numbers"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_up_to_the_most_are_tried(most: int, numbers: list[int]) -> None:
    threads = StepThreads(most)
    assert threads.most == most
    assert run(threads, lambda number: 1 / number, 15) == [most] * 15, "from the first step on"
    assert sorted(set(run(threads, float) + run(threads, lambda number: 1 / number))) == numbers
    assert run(threads, lambda number: 1 / number, 15)[-10:] == [most] * 10


def test_cores_that_are_busy_get_no_more_steps_but_for_a_trial_now_and_then() -> None:
    threads = StepThreads(4)
    run(threads, lambda number: 1 / number)
    numbers = run(threads, lambda number: float(number))
    assert numbers[-100:].count(1) >= 93
    assert set(numbers[-100:]) == {1, 2}
    assert run(threads, lambda number: 1 / number)[-15:].count(4) == 14


def test_the_best_number_may_lie_in_the_middle() -> None:
    threads = StepThreads(8)
    assert run(threads, lambda number: abs(number - 4) + 1.0)[-100:].count(4) >= 93


def test_a_gain_within_the_noise_changes_nothing() -> None:
    threads = StepThreads(2)
    assert run(threads, lambda number: 1.0 - 0.03 * (number == 1)).count(1) == 400 // 16


def test_steps_of_different_sizes_are_not_compared() -> None:
    threads, numbers = StepThreads(2), []
    for step in range(400):
        numbers.append(threads.next_number())
        threads.note(step, float(numbers[-1]))
    assert numbers.count(1) == 400 // 16
