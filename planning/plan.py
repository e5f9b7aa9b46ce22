"""The search for the fewest replicas with which a load meets its SLO."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raylens.planning.costs import Costs, Reserved, Work
from raylens.planning.load import Arrival, LoadProfile, Picture, Slo
from raylens.planning.outcome import STAGES, Outcome
from raylens.planning.settings import PlanError
from raylens.planning.shared_machine import WINDOW, SharedMachine, simulated_arrivals
from raylens.planning.simulation import Fleet, simulate

SEARCH_ORDER = ("generate", "encode", "preprocess", "ingress", "shared")
"""Whose replicas are reduced first: the dearest."""
MAX_UTILISATION = 0.8
_CELL_REPLICAS = 6
"""A larger load is simulated as a cell: a part of it for which no stage needs more replicas than about so many."""
_MAX_DOUBLINGS = 6
_GPU_TRIES, _NEAR_ENOUGH, _A_LITTLE_LESS = 6, 1.03, 0.995


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The replicas of one stage. `utilisation`: the load as a share of what they can do at most, in full batches.
    `busy`: the share of time in which a replica's busiest thread computes. It is higher: with less to do, batches are
    smaller."""

    name: str
    replicas: int
    cpus: float
    gpus: float
    utilisation: float
    busy: float


@dataclass(frozen=True, slots=True)
class Plan:
    """How many replicas a load needs. `outcome` is what the simulation predicts. `cell`: the part of the load that was
    simulated, 1 for all of it."""

    load: LoadProfile
    slo: Slo
    stages: tuple[StagePlan, ...]
    outcome: Outcome
    cell: float
    num_simulations: int
    cores: int | None = None
    """Of the machine that all stages share; None: each process has a core of its own."""

    @property
    def cpus(self) -> float:
        return sum(stage.cpus for stage in self.stages)

    @property
    def gpus(self) -> float:
        return sum(stage.gpus for stage in self.stages)

    @property
    def limiting_stage(self) -> str:
        """Returns the stage that is nearest to what it can do."""
        return max(self.stages, key=lambda stage: stage.utilisation).name

    def stage(self, name: str) -> StagePlan:
        return next(stage for stage in self.stages if stage.name == name)


def least_work(costs: Costs, load: LoadProfile) -> dict[str, float]:
    """Returns how many replicas each stage keeps busy at least, with full batches: by the utilisation law, requests a
    second times the seconds of a request (Lazowska et al., Quantitative System Performance, 1984, chapter 3). Each
    token counts as a piece, and messages cost nothing, because the tokens of many answers share one."""
    picture_rate = load.requests_per_second * load.picture_share
    pictures = [Picture(size, is_repeated, 0) for size in load.megapixels for is_repeated in (False, True)]
    shares = {False: 1 - load.repeated_share, True: load.repeated_share}

    def each(of_picture: Callable[[Picture], float]) -> float:
        """Returns the sum over a request's pictures, by how likely each is new or repeated."""
        return picture_rate * sum(shares[picture.is_repeated] * of_picture(picture) for picture in pictures)

    def new(of_picture: Callable[[Picture], float]) -> float:
        return each(lambda picture: 0.0 if picture.is_repeated else of_picture(picture))

    preprocess, encode, generate = costs.preprocess, costs.encode, costs.generate
    tokens = load.requests_per_second * load.prompt_tokens + each(costs.model.tokens)
    token_seconds = generate.seconds_per_step / generate.max_num_seqs + generate.seconds_per_sequence
    batch_share = costs.encode.seconds_per_batch / costs.encode.max_batch_patches

    def passing(work: Work) -> float:
        requests = load.requests_per_second * work.seconds_per_request + each(work.of_picture)
        return requests + load.tokens_per_second * work.seconds_per_piece

    return {
        "ingress": passing(costs.ingress.work),
        "shared": each(costs.shared.work.of_picture),
        "preprocess": max(
            each(preprocess.work.of_picture),
            new(lambda one: preprocess.seconds_per_item + preprocess.seconds_per_megapixel * one.megapixels),
        ),
        "encode": max(
            new(encode.work.of_picture),
            new(lambda one: (encode.seconds_per_patch + batch_share) * costs.model.patches(one)),
        ),
        "generate": max(
            load.tokens_per_second * token_seconds + tokens * generate.seconds_per_prompt_token,
            passing(generate.work),
        ),
    }


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to look for a plan. `cores`: of the machine that all processes share; None: each has a core of its own.
    `max_utilisation`: of any stage. `seed`: of the arrivals. `say` gets a line for each simulation. Raises PlanError
    unless `max_utilisation` is between 0 and 1."""

    cores: int | None = None
    max_utilisation: float = MAX_UTILISATION
    seed: int = 0
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        if not 0 < self.max_utilisation < 1:
            raise PlanError(f"max_utilisation: must be between 0 and 1, not {self.max_utilisation}")


class PlanSearch:
    """Looks for the fewest replicas."""

    def __init__(self, costs: Costs, load: LoadProfile, slo: Slo, options: SearchOptions) -> None:
        self._costs = costs
        self._load = load
        self._slo = slo
        self._options = options
        self._work = least_work(costs, load)
        whole = 1.0 if options.cores else _CELL_REPLICAS * options.max_utilisation / max(self._work.values())
        self._cell = min(1.0, whole)
        self._arrivals = self._cell_arrivals()
        self._outcomes: dict[tuple[int, ...], Outcome] = {}

    def run(self) -> Plan:
        """Returns the plan: no stage can have fewer replicas while the others stay. Raises PlanError if no number of
        replicas meets the SLO."""
        least = {stage: self._fewest(self._work[stage] * self._cell) for stage in STAGES}
        if self._options.cores is not None:
            self._check_cores(self._options.cores, least)
        replicas = self._enough(least)
        for stage in SEARCH_ORDER:
            replicas = self._reduced(replicas, stage, least[stage])
        return self._plan(replicas, self._outcome(replicas))

    def _check_cores(self, cores: int, least: Mapping[str, int]) -> None:
        """Raises PlanError if all stages together keep the cores busier than `max_utilisation`."""
        most = self._options.max_utilisation
        machine = SharedMachine(self._costs, least, self._arrivals, most, self._options.seed)
        if not machine.carries(cores):
            raise PlanError(
                f"cores: {cores} would be busier than {most:.0%} (max_utilisation) under this load;"
                f" {machine.fewest_cores(cores)} are the fewest that would not, whether they meet an SLO or not"
            )

    def _cell_arrivals(self) -> list[Arrival]:
        rate = self._load.requests_per_second * self._cell
        return simulated_arrivals(self._load.model_copy(update={"requests_per_second": rate}), self._options.seed)

    def _fewest(self, work: float) -> int:
        return max(1, math.ceil(work / self._options.max_utilisation))

    def _outcome(self, replicas: Mapping[str, int]) -> Outcome:
        key = tuple(replicas[stage] for stage in STAGES)
        if key not in self._outcomes:
            fleet = Fleet.of(replicas, self._options.cores)
            outcome = simulate(self._costs, fleet, self._arrivals, seed=self._options.seed, window=WINDOW)
            self._outcomes[key] = outcome
            counts = ", ".join(f"{stage} {count}" for stage, count in replicas.items())
            self._options.say(f"{counts}: TTFT p95 {outcome.ttft_p95:.3f} s, TPOT p95 {outcome.tpot_p95 or 0:.4f} s")
        return self._outcomes[key]

    def _misses(self, outcome: Outcome) -> list[tuple[str, float, float]]:
        """Returns what of the SLO an outcome does not meet: names, figures and limits."""
        figures = {"ttft_p95_seconds": outcome.ttft_p95, "tpot_p95_seconds": outcome.tpot_p95}
        limits: dict[str, Any] = self._slo.model_dump()
        return [
            (name, value, limits[name])
            for name, value in figures.items()
            if value is not None and limits[name] is not None and value > limits[name]
        ]

    def _enough(self, least: Mapping[str, int]) -> dict[str, int]:
        """Returns replicas of all stages that meet the SLO, doubled until they do."""
        replicas = dict(least)
        tried = []
        for _ in range(_MAX_DOUBLINGS):
            missed = self._misses(self._outcome(replicas))
            if not missed:
                return replicas
            tried.append(missed)
            replicas = {stage: 2 * count for stage, count in replicas.items()}
        # Replicas that share cores hinder each other, so the most are not always the best.
        nearest = min(tried, key=lambda missed: max(value / limit for _, value, limit in missed))
        where = "" if self._options.cores is None else f" on {self._options.cores} cores"
        raise PlanError(
            "; ".join(
                f"{name}: must be at least {value:.4g}, the best that replicas reach{where}, not {limit:.4g}"
                for name, value, limit in nearest
            )
        )

    def _reduced(self, replicas: dict[str, int], stage: str, least: int) -> dict[str, int]:
        """Returns the replicas with as few of one stage as meet the SLO: a binary search, for more never do worse."""
        low, high = least, replicas[stage]
        while low < high:
            middle = (low + high) // 2
            if self._misses(self._outcome({**replicas, stage: middle})):
                low = middle + 1
            else:
                high = middle
        return {**replicas, stage: high}

    def _plan(self, replicas: Mapping[str, int], outcome: Outcome) -> Plan:
        reserved = reserved_by_stage(self._costs)
        stages = []
        for stage in STAGES:
            count = self._whole(replicas[stage], self._work[stage])
            own, utilisation = reserved[stage], self._work[stage] / count
            busy = outcome.utilisation[stage] * replicas[stage] / self._cell / count
            stages.append(StagePlan(stage, count, count * own.cpus, count * own.gpus, utilisation, busy))
        return Plan(self._load, self._slo, tuple(stages), outcome, self._cell, len(self._outcomes), self._options.cores)

    def _whole(self, in_cell: int, work: float) -> int:
        """Returns the replicas for the whole load. A cell's only replica may have little to do; then the whole load
        needs as many as its utilisation tells, not one for each cell."""
        by_utilisation = self._fewest(work)
        return by_utilisation if in_cell == 1 else max(by_utilisation, math.ceil(in_cell / self._cell - 1e-9))


def reserved_by_stage(costs: Costs) -> dict[str, Reserved]:
    """Returns what a replica of each stage reserves."""
    return {
        "ingress": costs.ingress.reserved,
        "shared": costs.shared.reserved,
        "preprocess": costs.preprocess.reserved,
        "encode": costs.encode.reserved,
        "generate": costs.generate.reserved,
    }


def make_plan(costs: Costs, load: LoadProfile, slo: Slo, options: SearchOptions = SearchOptions()) -> Plan:
    """Returns the fewest replicas with which the load meets the SLO. Equal arguments give equal plans. Raises PlanError
    if no number of replicas does."""
    return PlanSearch(costs, load, slo, options).run()


def plan_for_gpus(
    costs: Costs, load: LoadProfile, slo: Slo, gpus: int, options: SearchOptions = SearchOptions()
) -> Plan:
    """Returns a plan for as much of this load as about `gpus` GPUs carry, and no more. Raises PlanError where no stage
    has a GPU, or where so many are too few for a replica of each stage."""
    if gpus < 1:
        raise PlanError(f"gpus: must be at least 1, not {gpus}")
    if all(own.gpus == 0 for own in reserved_by_stage(costs).values()):
        raise PlanError(
            f"gpus: must be 0 with costs whose stages use none, not {gpus}; --cost generate.reserved.gpus=1 assumes one"
        )
    for _ in range(_GPU_TRIES):
        plan = make_plan(costs, load, slo, options)
        factor = gpus / plan.gpus
        if 1 <= factor < _NEAR_ENOUGH:
            return plan
        rate = load.requests_per_second * factor * (1 if factor > 1 else _A_LITTLE_LESS)
        load = load.model_copy(update={"requests_per_second": rate})
    if plan.gpus > gpus:
        raise PlanError(f"gpus: must be at least {plan.gpus:g}, for a replica of each stage, not {gpus}")
    return plan
