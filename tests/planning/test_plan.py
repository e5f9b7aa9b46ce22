"""The search for the fewest replicas, and what a large fleet runs into."""

import math
import re

import pytest

from raylens.planning.ceilings import Ceiling, Hardware, ceilings
from raylens.planning.costs import Costs
from raylens.planning.load import LoadProfile, Slo, arrivals
from raylens.planning.plan import MAX_UTILISATION, WINDOW, Plan, SearchOptions, make_plan, plan_for_gpus
from raylens.planning.settings import PlanError
from raylens.planning.simulation import STAGES, Fleet, simulate
from raylens.planning.utilisation import least_work
from tests.planning.example_costs import example_costs

LOAD = LoadProfile(requests_per_second=60, picture_share=0.5, answer_tokens=20)


@pytest.fixture(scope="module")
def slo() -> Slo:
    """An SLO that the fewest replicas which can do the work do not meet."""
    loose = make_plan(example_costs(), LOAD, Slo())
    return Slo(ttft_p95_seconds=0.7 * loose.outcome.ttft_p95)


@pytest.fixture(scope="module")
def plan(slo: Slo) -> Plan:
    return make_plan(example_costs(), LOAD, slo)


def gpu_costs() -> Costs:
    generate = example_costs().generate.model_dump() | {"reserved": {"cpus": 1, "gpus": 1}, "seconds_per_step": 0.01}
    return example_costs(generate=generate)


def limit(slo: Slo) -> float:
    assert slo.ttft_p95_seconds is not None
    return slo.ttft_p95_seconds


def test_the_plan_meets_its_slo(plan: Plan, slo: Slo) -> None:
    assert plan.outcome.ttft_p95 <= limit(slo)
    assert all(stage.utilisation <= MAX_UTILISATION for stage in plan.stages)


def test_one_replica_less_of_any_stage_misses_the_slo_or_is_too_busy(plan: Plan, slo: Slo) -> None:
    replicas = {stage.name: stage.replicas for stage in plan.stages}
    load = arrivals(LOAD, 1500, 0)
    work = least_work(example_costs(), LOAD)
    num_tried = 0
    for stage in STAGES:
        fewer = {**replicas, stage: replicas[stage] - 1}
        if fewer[stage] < max(1, math.ceil(work[stage] / MAX_UTILISATION)):
            continue
        outcome = simulate(example_costs(), Fleet(fewer), load, window=WINDOW)
        assert outcome.ttft_p95 > limit(slo), stage
        num_tried += 1
    assert num_tried > 0


@pytest.mark.slow
def test_the_same_arguments_give_the_same_plan(plan: Plan, slo: Slo) -> None:
    assert make_plan(example_costs(), LOAD, slo) == plan


def test_more_load_needs_no_fewer_replicas() -> None:
    plans = [
        make_plan(example_costs(), LOAD.model_copy(update={"requests_per_second": rate}), Slo())
        for rate in (60.0, 150.0)
    ]
    for small, large in zip(plans[0].stages, plans[1].stages, strict=True):
        assert large.replicas >= small.replicas


def test_least_work_is_requests_times_their_seconds() -> None:
    work = least_work(example_costs(), LOAD)
    assert work["preprocess"] == pytest.approx(30 * 0.012)
    assert work["shared"] == pytest.approx(30 * 0.001)
    assert work["ingress"] == pytest.approx(60 * (0.002 + 20 * 0.00002))
    tokens = 60 * 100 + 30 * 50
    assert work["generate"] == pytest.approx(60 * 20 * (0.002 / 64 + 0.0001) + tokens * 0.00005)


def test_a_large_load_is_simulated_as_a_cell() -> None:
    large = make_plan(example_costs(), LOAD.model_copy(update={"requests_per_second": 6000.0}), Slo())
    assert large.cell < 0.1
    for stage, work in least_work(example_costs(), large.load).items():
        assert large.stage(stage).replicas >= work / MAX_UTILISATION
        assert large.stage(stage).replicas <= 2 * math.ceil(work / MAX_UTILISATION)


@pytest.mark.slow
def test_an_slo_that_no_replicas_meet_is_refused_with_what_is_possible() -> None:
    with pytest.raises(PlanError, match=r"ttft_p95_seconds: must be at least 0\.0\d+, .* not 0\.001"):
        make_plan(example_costs(), LOAD, Slo(ttft_p95_seconds=0.001))
    with pytest.raises(PlanError, match=r"tpot_p95_seconds: must be at least 0\.00\d+, .* not 0\.0001"):
        make_plan(example_costs(), LOAD, Slo(tpot_p95_seconds=0.0001))


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
def test_a_utilisation_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(PlanError, match=f"max_utilisation: must be between 0 and 1, not {value}"):
        make_plan(example_costs(), LOAD, Slo(), SearchOptions(max_utilisation=value))


def test_stages_that_share_a_machine_need_enough_cores() -> None:
    load = LOAD.model_copy(update={"requests_per_second": 20.0})
    shared = make_plan(example_costs(), load, Slo(), SearchOptions(cores=2))
    alone = make_plan(example_costs(), load, Slo())
    assert shared.outcome.ttft_p95 > alone.outcome.ttft_p95


@pytest.mark.parametrize(
    ("rate", "cores", "utilisation"), [pytest.param(60.0, 1, 0.8, marks=pytest.mark.slow), (40.0, 1, 0.5)]
)
def test_the_cores_that_are_named_are_enough_and_one_fewer_is_not(rate: float, cores: int, utilisation: float) -> None:
    load = LoadProfile(requests_per_second=rate, answer_tokens=20)

    def try_with(cores: int) -> Plan:
        return make_plan(example_costs(), load, Slo(), SearchOptions(cores=cores, max_utilisation=utilisation))

    with pytest.raises(PlanError, match=rf"cores: {cores} would be busier than {utilisation:.0%} ") as refused:
        try_with(cores)
    (fewest,) = map(int, re.findall(r"; (\d+) are the fewest that would not", str(refused.value)))
    outcome = try_with(fewest).outcome
    assert outcome.cores_busy <= utilisation * fewest
    assert fewest > cores
    with pytest.raises(PlanError, match=rf"; {fewest} are the fewest"):
        try_with(fewest - 1)


def test_a_fleet_of_many_gpus_takes_about_all_of_them() -> None:
    plan = plan_for_gpus(gpu_costs(), LOAD, Slo(), 1000)
    assert 950 <= plan.gpus <= 1000
    assert plan.load.requests_per_second > 1000


def test_gpus_without_a_stage_that_has_one_are_refused() -> None:
    with pytest.raises(PlanError, match="gpus: must be 0 with costs whose stages use none, not 8"):
        plan_for_gpus(example_costs(), LOAD, Slo(), 8)
    with pytest.raises(PlanError, match="gpus: must be at least 1, not 0"):
        plan_for_gpus(gpu_costs(), LOAD, Slo(), 0)


def test_the_nearest_ceiling_comes_first_and_each_says_where_its_figures_are_from() -> None:
    plan = plan_for_gpus(gpu_costs(), LOAD, Slo(), 1000)
    found = ceilings(plan, gpu_costs(), Hardware())
    assert found == sorted(found, key=lambda ceiling: ceiling.utilisation, reverse=True)
    assert {ceiling.name for ceiling in found} >= {
        "Serve controller",
        "HAProxy connections",
        "Ingress CPU",
        "Shared orders",
        "object transfers",
    }
    assert all(ceiling.basis and ceiling.grows for ceiling in found)


def ceiling_of(plan: Plan, costs: Costs, hardware: Hardware, name: str) -> Ceiling:
    return next(ceiling for ceiling in ceilings(plan, costs, hardware) if ceiling.name == name)


def test_what_is_not_measured_is_assumed_by_an_option(plan: Plan) -> None:
    controller = ceiling_of(plan, example_costs(), Hardware(controller_ms=2.0), "Serve controller")
    assert controller.basis == "assumed: --controller-ms"
    assert controller.used == pytest.approx(0.002 * sum(stage.replicas for stage in plan.stages))
    measured = example_costs(fleet={"controller_seconds_per_replica_second": 0.003})
    controller = ceiling_of(plan, measured, Hardware(), "Serve controller")
    assert controller.basis.startswith("measured")


def test_connections_follow_littles_law() -> None:
    plan = make_plan(example_costs(), LOAD.model_copy(update={"requests_per_second": 2000.0}), Slo())
    connections = ceiling_of(plan, example_costs(), Hardware(proxy_connections=100), "HAProxy connections")
    proxies = plan.stage("ingress").replicas
    assert proxies > 1
    assert connections.used == pytest.approx(2000 * plan.outcome.mean_latency / proxies)
    assert connections.limit == 100
