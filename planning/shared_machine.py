"""What one machine carries whose cores all stages share, by simulation."""

import math
from collections.abc import Mapping, Sequence

from raylens.planning.costs import Costs
from raylens.planning.load import Arrival, LoadProfile, arrivals
from raylens.planning.outcome import Window
from raylens.planning.simulation import Fleet, simulate

WINDOW = Window(0.2, 0.9)
"""Of the simulated requests, those that count."""
_TOKENS, _LEAST_REQUESTS, _MOST_REQUESTS = 60_000, 400, 1500
"""How many tokens a simulated load has, and bounds of its requests."""


def simulated_arrivals(load: LoadProfile, seed: int) -> list[Arrival]:
    """Returns as many requests of the load as a simulation needs."""
    return arrivals(load, max(_LEAST_REQUESTS, min(_MOST_REQUESTS, _TOKENS // load.answer_tokens)), seed)


class SharedMachine:
    """A machine on which each stage has so many replicas. `load`: what it is to carry. `most_busy`: the share of all
    cores that may compute."""

    def __init__(
        self, costs: Costs, replicas: Mapping[str, int], load: Sequence[Arrival], most_busy: float, seed: int
    ) -> None:
        self._costs = costs
        self._replicas = replicas
        self._load = load
        self._most_busy = most_busy
        self._seed = seed

    def carries(self, cores: int) -> bool:
        """Returns whether so many cores are no busier than they may be."""
        return self._cores_busy(cores) <= self._most_busy * cores

    def fewest_cores(self, too_few: int) -> int:
        """Returns the fewest cores, more than `too_few`, that carry the load."""
        cores = max(too_few + 1, math.ceil(self._cores_busy(None) / self._most_busy))
        while not self.carries(cores):
            cores += 1
        # Threads that wait for a core find more to do at once, and compute less in all.
        while cores - 1 > too_few and self.carries(cores - 1):
            cores -= 1
        return cores

    def _cores_busy(self, cores: int | None) -> float:
        """`cores`: None if each thread has one of its own."""
        fleet = Fleet.of(self._replicas, cores)
        outcome = simulate(self._costs, fleet, self._load, seed=self._seed, window=WINDOW)
        return outcome.cores_busy + self._costs.background_cores
