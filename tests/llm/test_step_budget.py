"""How many tokens of prompts a step takes up follows from how long steps took."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from raylens.llm.step_budget import StepBudget

Seconds = Callable[[int, int], float]
"""How long a step takes with so many decoding sequences and tokens of prompts."""

ROOM = 500


def decode(budget: StepBudget, num_decodes: int = 2, seconds: float = 1.0) -> None:
    budget.note(num_decodes, 0, seconds)


def run(budget: StepBudget, seconds: Seconds, num_steps: int, num_decodes: int = 2, num_tenants: int = 1) -> list[int]:
    """Returns how many tokens of prompts the steps had, while there is no end of prompts."""
    numbers = []
    for _ in range(num_steps):
        numbers.append(budget.prompt_tokens(num_decodes, ROOM, num_tenants))
        budget.note(num_decodes, numbers[-1], seconds(num_decodes, numbers[-1]))
    return numbers


def linear(each: float) -> Seconds:
    return lambda num_decodes, num_prompt_tokens: 1.0 + each * num_prompt_tokens


def test_without_a_bound_a_step_takes_all_it_has_room_for() -> None:
    budget = StepBudget()
    decode(budget)
    assert budget.prompt_tokens(2, ROOM) == ROOM


def test_without_decoding_sequences_a_step_takes_all_it_has_room_for() -> None:
    assert StepBudget(max_decode_slowdown=4.0).prompt_tokens(0, ROOM) == ROOM


def test_the_first_step_beside_prompts_only_decodes_to_show_how_long_that_takes() -> None:
    budget = StepBudget(max_decode_slowdown=4.0)
    assert budget.prompt_tokens(2, ROOM) == 0
    decode(budget)
    assert budget.prompt_tokens(2, ROOM) > 0


@pytest.mark.parametrize(("slowdown", "expected"), [(2.0, 100), (4.0, 300), (11.0, ROOM)])
def test_steps_come_to_take_as_long_as_they_may(slowdown: float, expected: int) -> None:
    numbers = run(StepBudget(max_decode_slowdown=slowdown), linear(0.01), 100)
    mixed = [number for number in numbers[20:] if number]
    assert all(expected - 8 <= number <= expected for number in mixed)


@pytest.mark.parametrize(("num_tenants", "expected"), [(2, 100), (3, 200), (9, 300)])
def test_prompts_slow_other_tenants_down_by_their_part_of_the_time(num_tenants: int, expected: int) -> None:
    numbers = run(StepBudget(max_decode_slowdown=4.0), linear(0.01), 100, num_tenants=num_tenants)
    mixed = [number for number in numbers[20:] if number]
    assert all(expected - 8 <= number <= expected for number in mixed)


def test_prompts_get_on_however_small_the_slowdown() -> None:
    numbers = run(StepBudget(max_decode_slowdown=1.001), linear(0.01), 60)
    assert {number for number in numbers[20:] if number} == {14}  # of 16 rows, two decode


def test_a_step_grows_no_faster_than_to_twice_the_last_one() -> None:
    """Few tokens cost less each than many, as they do in kernels that wait for memory."""

    def free_up_to_20(_: int, number: int) -> float:
        return 1.0 + 0.05 * max(0, number - 20)

    numbers = [number for number in run(StepBudget(max_decode_slowdown=4.0), free_up_to_20, 100) if number]
    assert all(after <= 2 * before for before, after in pairwise(numbers))
    assert all(70 <= number <= 80 for number in numbers[-20:])


def test_decoding_is_measured_again_and_again_however_many_prompts_there_are() -> None:
    budget = StepBudget(max_decode_slowdown=4.0)
    run(budget, linear(0.01), 50)

    def slower(_: int, number: int) -> float:
        return 2.0 + 0.02 * number

    numbers = run(budget, slower, 600)
    assert numbers.count(0) in (28, 29)
    assert numbers[-1] in range(285, 301)
    assert max(slower(2, number) for number in numbers) <= 8.0


def test_decoding_is_measured_at_once_when_there_are_many_more_sequences() -> None:
    budget = StepBudget(max_decode_slowdown=4.0)
    run(budget, linear(0.01), 50)

    def slower(num_decodes: int, number: int) -> float:
        return num_decodes / 2 + 0.01 * number

    assert run(budget, slower, 20, num_decodes=8)[0] == 0
    assert run(budget, slower, 5, num_decodes=8)[-1] == ROOM
    assert max(run(budget, slower, 60)[-20:]) in range(290, 301)


def test_a_few_steps_that_the_system_holds_up_change_little() -> None:
    draw = random.Random(0)

    def seconds(_: int, number: int) -> float:
        return (1.0 + 0.01 * number) * (10.0 if draw.random() < 0.1 else 1.0)

    numbers = [number for number in run(StepBudget(max_decode_slowdown=4.0), seconds, 400)[40:] if number]
    assert sorted(numbers)[len(numbers) // 10] >= 250
    assert max(numbers) <= 310


def test_what_a_token_costs_is_known_for_each_number_of_threads() -> None:
    num_threads = 2
    budget = StepBudget(max_decode_slowdown=4.0, num_threads=lambda: num_threads)

    def seconds(_: int, number: int) -> float:
        return 1.0 + 0.02 * number / num_threads

    assert run(budget, seconds, 60)[-1] in range(285, 301)
    num_threads = 1
    assert run(budget, seconds, 1) == [150]  # expected before it is measured
    num_threads = 2
    assert run(budget, seconds, 20)[-1] in range(285, 301)
    num_threads = 1
    assert all(seconds(2, number) <= 4.0 for number in run(budget, seconds, 3))
