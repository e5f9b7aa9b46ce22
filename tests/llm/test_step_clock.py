"""How long a step took is counted once, also where the next one was launched before it was read."""

import pytest

from raylens.llm.step_clock import StepClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: time[0])
    return time


def test_a_step_takes_from_its_launch_to_its_reading(now: list[float]) -> None:
    clock = StepClock()
    clock.start()
    now[0] = 103.0
    assert clock.note_read(clock.started) == 3.0


def test_a_step_launched_beside_another_takes_from_the_reading_of_that_one(now: list[float]) -> None:
    clock = StepClock()
    clock.start()
    first = clock.started
    now[0] = 101.0
    clock.start()
    second = clock.started
    now[0] = 104.0
    assert clock.note_read(first) == 4.0
    now[0] = 106.5
    assert clock.note_read(second) == 2.5
    assert clock.num_steps == 2


def test_parts_and_all_the_rest_are_the_time_of_the_host(now: list[float]) -> None:
    clock = StepClock()
    clock.start()
    with clock.part("schedule"):
        now[0] += 1.0
    with clock.part("model"):
        now[0] += 2.0
    now[0] += 0.5
    clock.end()
    assert clock.seconds == {"schedule": 1.0, "model": 2.0, "sample": 0.0, "other": 0.5}
