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

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.document import at_most, make_parser, publish, this_machine
from benchmarks.served_model import ROLES, ServedModel, megapixels, question, sending, served_bundled_model
from benchmarks.stage_costs import measure, shown
from benchmarks.streaming_client import Answer, Content, send_all
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

    @property
    def content(self) -> Content:
        return question([] if self.size is None else [(self.size, self.number)], self.words)


def draw_request(draw: random.Random) -> Drawn:
    has_picture = draw.random() < PICTURE_SHARE
    number = draw.randrange(NUM_REPEATED) + 1 if draw.random() < REPEATED_SHARE else None
    size, words, tokens = draw.choice(SIZES), draw.choice(WORDS), draw.choice(ANSWER_TOKENS)
    return Drawn(size if has_picture else None, number, words, tokens)


def arrival_of(drawn: Drawn, answer: Answer, key: int, tokens_per_picture: float) -> Arrival:
    """Returns a request for the simulation: its sending time and its contents."""
    pictures: tuple[Picture, ...] = ()
    if drawn.size is not None:
        pictures = (Picture(megapixels(drawn.size), drawn.number is not None, key),)
    text_tokens = answer.prompt_tokens - round(tokens_per_picture) * len(pictures)
    return Arrival(answer.sent, pictures, text_tokens, drawn.tokens)


def capacity(served: ServedModel) -> float:
    """Returns requests per second at a fixed concurrency."""
    draw = random.Random(1)
    drawn = [draw_request(draw) for _ in range(CAPACITY_REQUESTS)]
    asked = [(one.content, one.tokens) for one in drawn]
    began = time.perf_counter()
    with ThreadPoolExecutor(CAPACITY_CONCURRENCY) as pool:
        list(pool.map(lambda one: served.ask(*one), asked))
    return CAPACITY_REQUESTS / (time.perf_counter() - began)


def figures_of(drawn: Sequence[Drawn], answers: Sequence[Answer], cores_busy: float) -> dict[str, float]:
    seconds = max(answer.times[-1] for answer in answers) - answers[0].sent
    ttfts = [answer.ttft * 1e3 for answer in answers]
    tpots = [answer.tpot * 1e3 for answer in answers]
    by_kind = {kind: [ttft for ttft, one in zip(ttfts, drawn, strict=True) if one.kind == kind] for kind in KINDS}
    return {
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": sum(answer.num_tokens for answer in answers) / seconds,
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
    answers: list[Answer]
    others: float
    cores_busy: float


def run_load(served: ServedModel, rate: float, seconds: float, seed: int) -> Measured:
    """Runs a load, repeats it if other programs disturb it, and returns the quietest run."""
    tries: list[Measured] = []
    while len(tries) < MAX_TRIES and min((one.others for one in tries), default=1.0) > MAX_OTHERS:
        tries.append(_try_load(served, rate, seconds, seed))
    return min(tries, key=lambda one: one.others)


def _try_load(served: ServedModel, rate: float, seconds: float, seed: int) -> Measured:
    draw = random.Random(seed)
    moments = [draw.expovariate(rate)]
    while moments[-1] < seconds:
        moments.append(moments[-1] + draw.expovariate(rate))
    drawn = [draw_request(draw) for _ in moments[:-1]]
    sendings = [sending(moment, one.content, one.tokens) for moment, one in zip(moments, drawn, strict=False)]
    began, before = time.perf_counter(), served.cpu()
    answers, client = send_all(served.url, sendings)
    after, passed = served.cpu(), time.perf_counter() - began
    own = sum(after[role] - before[role] for role in ROLES) + client
    others = max(0.0, after["machine"] - before["machine"] - own) / passed
    return Measured(drawn, answers, others, own / passed)


def predicted(costs: Costs, measured: Measured, cores: int) -> dict[str, float]:
    """Returns the simulation's figures for the same arrivals, with the same background load."""
    load = [
        arrival_of(drawn, answer, key, costs.model.tokens_per_picture)
        for key, (drawn, answer) in enumerate(zip(measured.drawn, measured.answers, strict=True))
    ]
    fleet = Fleet(cores=cores, has_client=True, background_cores=measured.others)
    outcome = simulate(costs, fleet, load)
    answers = [
        replace(answer, sent=one.arrival.moment, times=[one.first_token, one.last_token], num_tokens=one.num_tokens)
        for answer, one in zip(measured.answers, outcome.answers, strict=True)
    ]
    return figures_of(measured.drawn, answers, outcome.cores_busy + costs.background_cores)


def compared(measured: Measured, prediction: dict[str, float]) -> dict[str, Any]:
    figures = figures_of(measured.drawn, measured.answers, measured.cores_busy)
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


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals at each load (default: %(default)s)")
    options = parser.parse_args()
    machine = this_machine()
    with served_bundled_model() as served:
        costs, phases = measure(served, options.rounds)
        for number in range(NUM_REPEATED):
            for size in SIZES:
                served.ask(question([(size, number + 1)]), 1)
        most = capacity(served)
        print(f"costs are measured; the capacity is {most:.1f} requests a second", flush=True)
        runs = {str(load): run_load(served, load * most, options.seconds, seed) for seed, load in enumerate(LOADS)}
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


if __name__ == "__main__":
    main()
