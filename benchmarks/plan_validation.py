"""Validates `raylens plan`: compares its predictions with a server's figures under loads that it has not seen.

    python -m benchmarks.plan_validation [--rounds 3] [--seconds 25] [--output FILE]

One run on this machine, with one server of the bundled model. First the costs are measured as by `python -m
benchmarks.stage_costs`, from sequential requests and from some concurrent streams. Second, the machine's capacity is
measured: the requests per second of a mix of texts, new pictures and repeated ones, at a fixed concurrency. Third, the
same mix arrives at random times (a Poisson process), at 0.3, 0.5 and 0.7 times the capacity, whether or not earlier
requests are answered. The simulation gets the same arrivals and the costs, which do not depend on these loads. Client
and server share the cores of this machine, and so they do in the simulation.

If other programs take more than 0.1 cores during a load, it runs a second time, and the quieter run counts. The table
shows these cores, and the simulation gets the same figure. An error is (predicted - measured) / measured. The last line
is one JSON document.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import at_most, publish, this_machine
from benchmarks.open_loop_client import Sending, TimedAnswer
from benchmarks.served_model import ROLES, Photos, Seconds, ServedModel, megapixels, sending, served_bundled_model
from benchmarks.stage_costs import measure, shown
from benchmarks.streaming_client import Content
from raylens.planning.costs import Costs
from raylens.planning.load import Arrival, Picture
from raylens.planning.simulation import Fleet, percentile, simulate

KINDS = ("text", "new picture", "repeated picture")
LOADS = (0.3, 0.5, 0.7)
"""Shares of the capacity."""
PICTURE_SHARE, REPEATED_SHARE = 0.3, 0.3
SIZES, WORDS, ANSWER_TOKENS = (0.3, 0.8), (6, 20), (16, 48)
"""Requests draw uniformly from each of these."""
NUM_REPEATED = 4
"""Number of different repeated pictures."""
CAPACITY_REQUESTS, CAPACITY_CONCURRENCY = 160, 8
ERROR = 0.15
CHECKED = ("requests_per_second", "ttft_ms_p50", "tpot_ms_p50")
MAX_OTHERS, MAX_TRIES = 0.1, 2


@dataclass(frozen=True)
class Drawn:
    """The contents of one request."""

    size: float | None
    number: int | None
    words: int
    tokens: int

    @property
    def kind(self) -> str:
        if self.size is None:
            return "text"
        return "new picture" if self.number is None else "repeated picture"


def draw_request(draw: random.Random) -> Drawn:
    has_picture = draw.random() < PICTURE_SHARE
    number = draw.randrange(NUM_REPEATED) + 1 if draw.random() < REPEATED_SHARE else None
    size, words, tokens = draw.choice(SIZES), draw.choice(WORDS), draw.choice(ANSWER_TOKENS)
    return Drawn(size if has_picture else None, number, words, tokens)


class Mix:
    """The requests of all loads, for the server and for the simulation."""

    def __init__(self, photos: Photos) -> None:
        self._photos = photos

    def content(self, drawn: Drawn) -> Content:
        pictures = [] if drawn.size is None else [(drawn.size, drawn.number)]
        return self._photos.question(pictures, drawn.words)

    def sending(self, moment: float, drawn: Drawn) -> Sending:
        return sending(moment, self.content(drawn), drawn.tokens)


def arrival_of(drawn: Drawn, answer: TimedAnswer, key: int, tokens_per_picture: float) -> Arrival:
    """Returns a request for the simulation: its sending time and its contents."""
    pictures: tuple[Picture, ...] = ()
    if drawn.size is not None:
        pictures = (Picture(megapixels(drawn.size), drawn.number is not None, key),)
    text_tokens = answer.prompt_tokens - round(tokens_per_picture) * len(pictures)
    return Arrival(answer.sent, pictures, text_tokens, drawn.tokens)


def capacity(served: ServedModel, mix: Mix) -> float:
    """Returns requests per second at a fixed concurrency."""
    draw = random.Random(1)
    drawn = [draw_request(draw) for _ in range(CAPACITY_REQUESTS)]
    asked = [(mix.content(one), one.tokens) for one in drawn]
    began = time.perf_counter()
    with ThreadPoolExecutor(CAPACITY_CONCURRENCY) as pool:
        list(pool.map(lambda one: served.ask(*one), asked))
    return CAPACITY_REQUESTS / (time.perf_counter() - began)


@dataclass(frozen=True)
class Times:
    """Times of a request: sent, first text and last text, in seconds."""

    kind: str
    sent: float
    first: float
    last: float
    num_tokens: int


def figures_of(requests: Sequence[Times], cores_busy: float) -> dict[str, float]:
    seconds = max(request.last for request in requests) - requests[0].sent
    ttfts = [(request.first - request.sent) * 1e3 for request in requests]
    tpots = [(request.last - request.first) / (request.num_tokens - 1) * 1e3 for request in requests]
    by_kind = {kind: [ttft for ttft, one in zip(ttfts, requests, strict=True) if one.kind == kind] for kind in KINDS}
    return {
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": sum(request.num_tokens for request in requests) / seconds,
        "ttft_ms_p50": percentile(ttfts, 50),
        "ttft_ms_p95": percentile(ttfts, 95),
        **{f"ttft_ms_p50, {kind}": percentile(own, 50) for kind, own in by_kind.items()},
        "tpot_ms_p50": percentile(tpots, 50),
        "tpot_ms_p95": percentile(tpots, 95),
        "cores_busy": cores_busy,
    }


@dataclass(frozen=True)
class Measured:
    """A load's measurement. `others`: cores used by other programs."""

    drawn: list[Drawn]
    answers: list[TimedAnswer]
    others: float
    cores_busy: float

    def figures(self) -> dict[str, float]:
        times = [
            Times(drawn.kind, answer.sent, answer.first, answer.last, answer.num_tokens)
            for drawn, answer in zip(self.drawn, self.answers, strict=True)
        ]
        return figures_of(times, self.cores_busy)


def run_load(served: ServedModel, mix: Mix, rate: float, seconds: float, seed: int) -> Measured:
    """Runs a load, repeats it if other programs disturb it, and returns the quietest run."""
    tries: list[Measured] = []
    while len(tries) < MAX_TRIES and min((one.others for one in tries), default=1.0) > MAX_OTHERS:
        tries.append(_try_load(served, mix, rate, seconds, seed))
    return min(tries, key=lambda one: one.others)


def _try_load(served: ServedModel, mix: Mix, rate: float, seconds: float, seed: int) -> Measured:
    draw = random.Random(seed)
    moments = [draw.expovariate(rate)]
    while moments[-1] < seconds:
        moments.append(moments[-1] + draw.expovariate(rate))
    drawn = [draw_request(draw) for _ in moments[:-1]]
    sendings = [mix.sending(moment, one) for moment, one in zip(moments, drawn, strict=False)]
    began, before = time.perf_counter(), served.cpu()
    answers, client = served.send(sendings)
    after, passed = served.cpu(), time.perf_counter() - began
    own = _used(before, after) + client
    others = max(0.0, after["machine"] - before["machine"] - own) / passed
    return Measured(drawn, answers, others, own / passed)


def _used(before: Seconds, after: Seconds) -> float:
    return sum(after[role] - before[role] for role in ROLES)


def predicted(costs: Costs, measured: Measured, cores: int) -> dict[str, float]:
    """Returns the simulation's figures for the same arrivals, with the same background load."""
    load = [
        arrival_of(drawn, answer, key, costs.model.tokens_per_picture)
        for key, (drawn, answer) in enumerate(zip(measured.drawn, measured.answers, strict=True))
    ]
    fleet = Fleet(cores=cores, has_client=True, background_cores=measured.others)
    outcome = simulate(costs, fleet, load)
    times = [
        Times(drawn.kind, one.arrival.moment, one.first_token, one.last_token, one.num_tokens)
        for drawn, one in zip(measured.drawn, outcome.answers, strict=True)
    ]
    return figures_of(times, outcome.cores_busy + costs.background_cores)


def compared(measured: Measured, prediction: dict[str, float]) -> dict[str, Any]:
    figures = measured.figures()
    return {
        "measured": {name: round(value, 4) for name, value in figures.items()},
        "predicted": {name: round(value, 4) for name, value in prediction.items()},
        "error": {name: round(prediction[name] / value - 1, 3) for name, value in figures.items()},
        "requests": len(measured.answers),
        "others_cores": round(measured.others, 3),
    }


def print_table(loads: dict[str, dict[str, Any]]) -> None:
    print(f"{'load':>5} {'figure':<29} {'measured':>9} {'predicted':>9} {'error':>7}")
    for load, own in loads.items():
        for name, value in own["measured"].items():
            print(f"{load:>5} {name:<29} {value:>9.3f} {own['predicted'][name]:>9.3f} {own['error'][name]:>+7.1%}")
        print(f"{load:>5} {'other programs':<29} {own['others_cores']:>9.3f} cores, {own['requests']} requests")


def checks_of(loads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        f"load {load}: error of {name}": at_most(abs(own["error"][name]), ERROR)
        for load, own in loads.items()
        for name in CHECKED
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of measuring costs (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals at each load (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    machine = this_machine()
    mix = Mix(Photos())
    with served_bundled_model() as served:
        costs, phases = measure(served, options.rounds)
        for number in range(NUM_REPEATED):
            for size in SIZES:
                served.ask(mix.content(Drawn(size, number + 1, WORDS[0], 1)), 1)
        most = capacity(served, mix)
        print(f"costs are measured; the capacity is {most:.1f} requests a second", flush=True)
        runs = {str(load): run_load(served, mix, load * most, options.seconds, seed) for seed, load in enumerate(LOADS)}
    loads = {load: compared(own, predicted(costs, own, machine["cpus"])) for load, own in runs.items()}
    print_table(loads)
    document = {
        "checks": checks_of(loads),
        "capacity_requests_per_second": round(most, 2),
        "loads": loads,
        "costs": costs.model_dump(),
        "phases": shown(phases),
        "machine": machine,
    }
    publish(document, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
