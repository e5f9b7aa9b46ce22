"""What a request alone tells about costs: how much of each process's work its first token waits for.

Processor time is visible from outside, but not whether a process does something before it passes a request on, or
behind that. The share before it is chosen so that a simulated request alone has the TTFT of a measured one. If all of
the work is not enough for that, the rest is time in which nothing is computed.
"""

from dataclasses import dataclass

from raylens.planning.costs import ByKind, Costs
from raylens.planning.load import Arrival, Picture
from raylens.planning.simulation import Fleet, simulate

_STEPS = 30


@dataclass(frozen=True, slots=True)
class Alone:
    """Medians of requests that came one after the other, in seconds. Prompts had `text_tokens` besides those of
    pictures, and answers for `tpot` had `answer_tokens`."""

    text_tokens: int
    megapixels: float
    ttft_text: float
    ttft_new_picture: float
    ttft_repeated_picture: float
    answer_tokens: int
    tpot: float


def calibrated(costs: Costs, alone: Alone, *, cores: int) -> Costs:
    """Returns the costs with shares and waits for which requests alone take as long as measured. The client and the
    server shared `cores` cores."""
    fleet = Fleet(cores=cores, has_client=True)
    costs = _with_step_wait(costs, alone, fleet)
    targets = {
        "text": ((), alone.ttft_text),
        "new_picture": ((Picture(alone.megapixels, False, 0),), alone.ttft_new_picture),
        "repeated_picture": ((Picture(alone.megapixels, True, 0),), alone.ttft_repeated_picture),
    }
    shares, waits = {}, {}
    for kind, (pictures, ttft) in targets.items():
        arrival = Arrival(0.0, pictures, alone.text_tokens, 1)
        shares[kind], waits[kind] = _share_and_wait(costs, fleet, arrival, ttft)
    return costs.model_copy(update={"on_path_share": ByKind(**shares), "wait_seconds": ByKind(**waits)})


def _with_step_wait(costs: Costs, alone: Alone, fleet: Fleet) -> Costs:
    """Returns the costs with the time between two steps that makes a stream alone as slow as measured."""
    arrival = Arrival(0.0, (), alone.text_tokens, alone.answer_tokens)
    simulated = simulate(costs, fleet, [arrival]).tpot_p50
    wait = max(0.0, alone.tpot - (simulated or 0.0))
    return costs.model_copy(update={"generate": costs.generate.model_copy(update={"wait_per_step": wait})})


def _share_and_wait(costs: Costs, fleet: Fleet, arrival: Arrival, ttft: float) -> tuple[float, float]:
    def simulated(share: float) -> float:
        shares = ByKind(text=share, new_picture=share, repeated_picture=share)
        return simulate(costs.model_copy(update={"on_path_share": shares}), fleet, [arrival]).ttft_p50

    if (longest := simulated(1.0)) <= ttft:
        return 1.0, ttft - longest
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if simulated(middle) < ttft else (low, middle)
    return low, 0.0
