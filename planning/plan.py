"""Searches the fewest replicas with which a load meets its SLO."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raylens.planning.costs import Costs
from raylens.planning.load import LoadProfile, Slo, arrivals
from raylens.planning.settings import PlanError
from raylens.planning.simulation import STAGES, Fleet, Outcome, simulate
from raylens.planning.utilisation import least_work

_SEARCH_ORDER = ("generate", "encode", "preprocess", "ingress", "shared")  # the most expensive stage first
MAX_UTILISATION = 0.8
WINDOW = (0.2, 0.9)
"""Only requests between these shares of the simulation count."""
_TOKENS, _LEAST_REQUESTS, _MOST_REQUESTS = 60_000, 400, 1500
"""The tokens of a simulated load, and bounds of its requests."""
_CELL_REPLICAS = 6
"""Of a larger load, the search simulates a cell, which needs about this many replicas of the busiest stage."""
_MAX_DOUBLINGS = 6
_GPU_TRIES, _NEAR_ENOUGH, _A_LITTLE_LESS = 6, 1.03, 0.995


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The replicas of one stage. `utilisation`: the load as a share of their capacity with full batches. `busy`: the
    share of time in which a replica's busiest thread computes; it is higher, because a lower load has smaller
    batches."""

    name: str
    replicas: int
    cpus: float
    gpus: float
    utilisation: float
    busy: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The replicas that a load needs, and the simulation's prediction. `cell`: the simulated part of the load, 1 for
    all of it. `cores`: of the machine that all stages share; None: each process has its own core."""

    load: LoadProfile
    slo: Slo
    stages: tuple[StagePlan, ...]
    outcome: Outcome
    cell: float
    num_simulations: int
    cores: int | None

    @property
    def cpus(self) -> float:
        return sum(stage.cpus for stage in self.stages)

    @property
    def gpus(self) -> float:
        return sum(stage.gpus for stage in self.stages)

    @property
    def limiting_stage(self) -> str:
        """Returns the stage nearest to its capacity."""
        return max(self.stages, key=lambda stage: stage.utilisation).name

    def stage(self, name: str) -> StagePlan:
        return next(stage for stage in self.stages if stage.name == name)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """`cores`: of the machine that all processes share; None: each has its own core. `max_utilisation`: of any stage.
    `seed`: of the arrivals. `say` gets a line for each simulation. Raises PlanError for a value out of range."""

    cores: int | None = None
    max_utilisation: float = MAX_UTILISATION
    seed: int = 0
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        if not 0 < self.max_utilisation < 1:
            raise PlanError(f"max_utilisation: must be between 0 and 1, not {self.max_utilisation}")
        if self.cores is not None and self.cores < 1:
            raise PlanError(f"cores: must be at least 1, not {self.cores}")


class PlanSearch:
    def __init__(self, costs: Costs, load: LoadProfile, slo: Slo, options: SearchOptions) -> None:
        self._costs = costs
        self._load = load
        self._slo = slo
        self._options = options
        self._work = least_work(costs, load)
        whole = 1.0 if options.cores else _CELL_REPLICAS * options.max_utilisation / max(self._work.values())
        self._cell = min(1.0, whole)
        cell = load.model_copy(update={"requests_per_second": load.requests_per_second * self._cell})
        count = max(_LEAST_REQUESTS, min(_MOST_REQUESTS, _TOKENS // load.answer_tokens))
        self._arrivals = arrivals(cell, count, options.seed)
        self._outcomes: dict[tuple[int | None, ...], Outcome] = {}

    def run(self) -> Plan:
        """Returns a plan in which no single stage can have fewer replicas. Raises PlanError if no number of replicas
        meets the SLO, or if there are too few cores."""
        least = {stage: self._fewest(self._work[stage] * self._cell) for stage in STAGES}
        if self._options.cores is not None:
            self._check_cores(self._options.cores, least)
        replicas = self._enough(least)
        for stage in _SEARCH_ORDER:
            replicas = self._reduced(replicas, stage, least[stage])
        return self._plan(replicas, self._outcome(replicas, self._options.cores))

    def _check_cores(self, cores: int, replicas: Mapping[str, int]) -> None:
        """Raises PlanError with the fewest sufficient cores if all stages together exceed `max_utilisation`."""
        most = self._options.max_utilisation

        def busy(count: int | None) -> float:
            return self._outcome(replicas, count).cores_busy + self._costs.background_cores

        def carry(count: int) -> bool:
            return busy(count) <= most * count

        if carry(cores):
            return
        fewest = max(cores + 1, math.ceil(busy(None) / most))
        while not carry(fewest):
            fewest += 1
        # Fewer cores may suffice: waiting threads batch more work and compute less in total.
        while fewest - 1 > cores and carry(fewest - 1):
            fewest -= 1
        raise PlanError(
            f"cores: {cores} would be busier than {most:.0%} (max_utilisation) under this load;"
            f" {fewest} are the fewest that would not, whether they meet an SLO or not"
        )

    def _fewest(self, work: float) -> int:
        return max(1, math.ceil(work / self._options.max_utilisation))

    def _outcome(self, replicas: Mapping[str, int], cores: int | None) -> Outcome:
        key = (*(replicas[stage] for stage in STAGES), cores)
        if key not in self._outcomes:
            fleet, seed = Fleet(replicas, cores), self._options.seed
            self._outcomes[key] = simulate(self._costs, fleet, self._arrivals, seed=seed, window=WINDOW)
        return self._outcomes[key]

    def _misses(self, replicas: Mapping[str, int]) -> list[tuple[str, float, float]]:
        """Returns (name, figure, limit) of each missed SLO."""
        outcome, slo = self._outcome(replicas, self._options.cores), self._slo
        counts = ", ".join(f"{stage} {count}" for stage, count in replicas.items())
        self._options.say(f"{counts}: TTFT p95 {outcome.ttft_p95:.3f} s, TPOT p95 {outcome.tpot_p95 or 0:.4f} s")
        figures = [
            ("ttft_p95_seconds", outcome.ttft_p95, slo.ttft_p95_seconds),
            ("tpot_p95_seconds", outcome.tpot_p95 or 0.0, slo.tpot_p95_seconds),
        ]
        return [(name, value, limit) for name, value, limit in figures if limit is not None and value > limit]

    def _enough(self, least: Mapping[str, int]) -> dict[str, int]:
        """Returns replicas that meet the SLO, doubling all stages until they do."""
        replicas = dict(least)
        tried = []
        for _ in range(_MAX_DOUBLINGS):
            if not (missed := self._misses(replicas)):
                return replicas
            tried.append(missed)
            replicas = {stage: 2 * count for stage, count in replicas.items()}
        # Replicas that share cores slow each other down, so the most are not always the best.
        nearest = min(tried, key=lambda missed: max(value / limit for _, value, limit in missed))
        where = "" if self._options.cores is None else f" on {self._options.cores} cores"
        problem = "{}: must be at least {:.4g}, the best that replicas reach{}, not {:.4g}"
        raise PlanError("; ".join(problem.format(name, value, where, limit) for name, value, limit in nearest))

    def _reduced(self, replicas: dict[str, int], stage: str, least: int) -> dict[str, int]:
        """Returns the replicas with one stage reduced as far as the SLO allows. A binary search, because more replicas
        never do worse."""
        low, high = least, replicas[stage]
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._misses({**replicas, stage: middle}) else (low, middle)
        return {**replicas, stage: high}

    def _plan(self, replicas: Mapping[str, int], outcome: Outcome) -> Plan:
        stages = []
        for stage in STAGES:
            count = self._whole(replicas[stage], self._work[stage])
            own, utilisation = self._costs.reserved(stage), self._work[stage] / count
            busy = outcome.utilisation[stage] * replicas[stage] / self._cell / count
            stages.append(StagePlan(stage, count, count * own.cpus, count * own.gpus, utilisation, busy))
        return Plan(self._load, self._slo, tuple(stages), outcome, self._cell, len(self._outcomes), self._options.cores)

    def _whole(self, in_cell: int, work: float) -> int:
        """Returns the replicas for the whole load. A single replica in a cell may be nearly idle, so the whole load
        needs replicas by utilisation, not one per cell."""
        by_utilisation = self._fewest(work)
        return by_utilisation if in_cell == 1 else max(by_utilisation, math.ceil(in_cell / self._cell - 1e-9))


def make_plan(costs: Costs, load: LoadProfile, slo: Slo, options: SearchOptions = SearchOptions()) -> Plan:
    """Returns the fewest replicas with which the load meets the SLO. Equal arguments give equal plans. Raises PlanError
    if no number of replicas does."""
    return PlanSearch(costs, load, slo, options).run()


def plan_for_gpus(
    costs: Costs, load: LoadProfile, slo: Slo, gpus: int, options: SearchOptions = SearchOptions()
) -> Plan:
    """Returns a plan for the largest load of this kind that about `gpus` GPUs carry. Raises PlanError if no stage uses
    a GPU, or if `gpus` is too few for a replica of each stage."""
    if gpus < 1:
        raise PlanError(f"gpus: must be at least 1, not {gpus}")
    if all(costs.reserved(stage).gpus == 0 for stage in STAGES):
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
