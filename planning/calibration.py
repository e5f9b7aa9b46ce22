"""Fits to isolated requests the share of each process's work that delays the first token.

CPU time does not show whether a process works before or after it passes a request on. With the fitted share, a
simulated request is as fast as a measured one. If all work is too little for that, the rest is idle wait time."""

from dataclasses import dataclass

from raylens.planning.costs import ByKind, Costs
from raylens.planning.load import Arrival, Picture
from raylens.planning.simulation import Fleet, simulate

_BISECTIONS = 30


@dataclass(frozen=True, slots=True)
class Alone:
    """Medians of sequential requests, in seconds. Prompts had `text_tokens` besides those of pictures, and answers for
    `tpot` had `answer_tokens`."""

    text_tokens: int
    megapixels: float
    ttft_text: float
    ttft_new_picture: float
    ttft_repeated_picture: float
    answer_tokens: int
    tpot: float


def calibrated(costs: Costs, alone: Alone, *, cores: int) -> Costs:
    """Returns the costs with which isolated requests take as long as measured. The client and the server shared `cores`
    cores."""
    fleet = Fleet(cores=cores, has_client=True)
    stream = Arrival(0.0, (), alone.text_tokens, alone.answer_tokens)
    wait = max(0.0, alone.tpot - (simulate(costs, fleet, [stream]).tpot_p50 or 0.0))
    costs = costs.model_copy(update={"generate": costs.generate.model_copy(update={"wait_per_step": wait})})

    def fit(ttft: float, *pictures: Picture) -> tuple[float, float]:
        """Returns the share and the wait with which a request with these pictures has this TTFT."""
        request = Arrival(0.0, pictures, alone.text_tokens, 1)

        def simulated(share: float) -> float:
            shares = ByKind(text=share, new_picture=share, repeated_picture=share)
            return simulate(costs.model_copy(update={"on_path_share": shares}), fleet, [request]).ttft_p50

        if (longest := simulated(1.0)) <= ttft:
            return 1.0, ttft - longest
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if simulated(middle) < ttft else (low, middle)
        return low, 0.0

    text = fit(alone.ttft_text)
    new = fit(alone.ttft_new_picture, Picture(alone.megapixels, False, 0))
    repeated = fit(alone.ttft_repeated_picture, Picture(alone.megapixels, True, 0))
    shares, waits = (
        ByKind(text=t, new_picture=n, repeated_picture=r) for t, n, r in zip(text, new, repeated, strict=True)
    )
    return costs.model_copy(update={"on_path_share": shares, "wait_seconds": waits})
