"""The simulation against what queueing theory gives in closed form."""

import itertools
import random
import statistics
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.planning.cores import Machine, Process
from raylens.planning.costs import Costs
from raylens.planning.load import Arrival, LoadProfile, arrivals
from raylens.planning.simulation import Fleet, simulate
from raylens.planning.virtual_time import Clock
from tests.planning.example_costs import example_costs, idle_costs


def texts(rate: float, count: int, seed: int = 0, **fields: int) -> list[Arrival]:
    load = LoadProfile(requests_per_second=rate, **{"prompt_tokens": 1, "answer_tokens": 1, **fields})
    return arrivals(load, count, seed)


def mean_time(work: Iterator[float], rate: float, count: int, *, at_once: bool) -> float:
    """Returns the mean time in the system of `count` jobs: on one process, or, if they go on `at_once`, on threads of
    their own that share one core."""
    clock, draw, times = Clock(), random.Random(0), list[float]()
    process, shared = Process(Machine(clock, None)), Machine(clock, 1)

    def come(seconds: float) -> None:
        came = clock.now

        def end() -> None:
            times.append(clock.now - came)

        (Process(shared) if at_once else process).submit(seconds, end)

    moment = 0.0
    for seconds in itertools.islice(work, count):
        moment += draw.expovariate(rate)
        clock.after(moment, partial(come, seconds))
    clock.run()
    return statistics.mean(times)


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_constant_work_waits_as_in_m_d_1(utilisation: float) -> None:
    """Mean wait in M/D/1: rho s / (2 (1 - rho)) (Pollaczek and Khinchine)."""
    mean = mean_time(itertools.repeat(1.0), utilisation, 20_000, at_once=False)
    assert mean - 1 == pytest.approx(utilisation / (2 * (1 - utilisation)), rel=0.12)


@pytest.mark.parametrize("at_once", [False, True])
def test_exponential_work_takes_as_long_as_in_m_m_1(at_once: bool) -> None:
    """Mean time in M/M/1: s / (1 - rho), whether one after the other or by processor sharing."""
    draw = random.Random(1)
    work = iter(lambda: draw.expovariate(1.0), None)
    assert mean_time(work, 0.6, 20_000, at_once=at_once) == pytest.approx(1 / (1 - 0.6), rel=0.1)


def test_processor_sharing_does_not_depend_on_the_distribution_of_work() -> None:
    """Mean time in M/G/1-PS: s / (1 - rho) (Kleinrock, Queueing Systems II, 1976, section 4.4)."""
    assert mean_time(itertools.repeat(1.0), 0.6, 20_000, at_once=True) == pytest.approx(1 / (1 - 0.6), rel=0.1)


def test_requests_wait_for_a_stage_as_in_m_d_1() -> None:
    """The same through the whole pipeline: an engine that computes one prompt at a time."""
    service, utilisation = 0.01, 0.6
    costs = idle_costs(generate={"seconds_per_step": service, "max_num_seqs": 1})
    answers = simulate(costs, Fleet(), texts(utilisation / service, 4000)).answers
    wait = statistics.mean(answer.time_to_first_token for answer in answers) - service
    assert wait == pytest.approx(utilisation * service / (2 * (1 - utilisation)), rel=0.12)


@given(st.floats(5, 60), st.integers(0, 5), st.floats(0, 1))
@settings(max_examples=15, deadline=None)
def test_utilisation_law(rate: float, seed: int, picture_share: float) -> None:
    """Busy time is the work that came: each request has its seconds, however it waits."""
    costs = example_costs()
    load = LoadProfile(requests_per_second=rate, picture_share=picture_share, answer_tokens=4)
    came = arrivals(load, 300, seed)
    outcome = simulate(costs, Fleet(), came)
    seconds = max(answer.last_token for answer in outcome.answers) - came[0].moment
    pictures = sum(len(arrival.pictures) for arrival in came)
    assert outcome.utilisation["preprocess"] == pytest.approx(pictures * 0.012 / seconds, rel=0.02, abs=1e-9)
    assert outcome.utilisation["shared"] == pytest.approx(pictures * 0.001 / seconds, rel=0.02, abs=1e-9)


def test_a_request_alone_takes_the_sum_of_its_costs() -> None:
    costs: Costs = example_costs()
    alone = Arrival(0.0, (), prompt_tokens=100, answer_tokens=11)
    outcome = simulate(costs, Fleet(), [alone])
    step = 0.002 + 0.0001
    assert outcome.ttft_p50 == pytest.approx(0.002 + 0.002 + 100 * 0.00005 + 0.00002)
    assert outcome.tpot_p50 == pytest.approx(step)


def test_the_busy_time_of_a_machine_is_all_that_is_computed() -> None:
    costs = idle_costs(
        ingress={"work": {"seconds_per_request": 0.01}}, generate={"seconds_per_step": 0.01, "max_num_seqs": 1}
    )
    outcome = simulate(costs, Fleet(cores=2), texts(20, 2000))
    assert outcome.cores_busy == pytest.approx(20 * 0.02, rel=0.1)
