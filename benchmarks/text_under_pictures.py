"""Two streams of text while large pictures arrive: does text wait behind them, and what do the pictures pay for it?

    python -m benchmarks.text_under_pictures [--seconds 20] [--rounds 2] [--output FILE]

Two checkpoints of random weights with 40 million parameters in the language half: a Qwen2.5-VL, for which a picture is
1,225 tokens, and a LLaVA, for which it is 576. Each round serves each of them twice: in steps of the whole
budget (`OLD`), and with the engine's own defaults. Two clients stream short texts, one after the other,
all the time. Pictures of 2048 x 2048, each a new one, arrive at random moments, at 0.5, 1 and 2 times the rate that the
machine holds beside the text. This rate is measured first, with `OLD` and some pictures always under way. Arrivals end
after `--seconds`; what has arrived is answered while text goes on, and counts. Both schedules meet the same arrivals.

ITL is the time between two pieces of a text stream, TTFT the time from a request to its first piece. Throughput is
pictures a second from the first arrival to the last answer or to the end of arrivals, whichever is later. A ratio is
the defaults' figure over that of `OLD`, both of all rounds together. The last line is one JSON document.
"""

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.document import at_least, at_most, publish, this_machine
from benchmarks.preprocess import photograph
from benchmarks.random_checkpoint import make_checkpoint, make_qwen_checkpoint
from benchmarks.streaming_client import Content, StreamedAnswer, ask, ask_all
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.demo import picture_part
from raylens.deployments.launch.local_cluster import free_port, running_app

MODEL = "random"
SHAPES: dict[str, Callable[[Path], int]] = {
    "Qwen2.5-VL": make_qwen_checkpoint,
    "LLaVA": lambda folder: make_checkpoint(folder, image_size=336),
}
OLD = {"max_decode_slowdown": None}
SCHEDULES: dict[str, dict[str, Any]] = {"old": OLD, "new": {}}
LOADS = (0.5, 1.0, 2.0)
NUM_STREAMS, TEXT_TOKENS, PICTURE_TOKENS = 2, 64, 8
CAPACITY_CONCURRENCY, CAPACITY_PICTURES = 4, 16
TARGETS = {
    "text_itl_ms_p99": 0.35,
    "text_ttft_ms_p99": 0.4,
    "picture_ttft_ms_p50": 1.15,
    "pictures_per_second": 0.95,
}
"""Ratios of the new schedule to the old: of times at most, of throughputs at least."""

Figures = dict[str, float]
_numbers = itertools.count()


@dataclass
class Outcome:
    """The answers of one load, and the seconds that the pictures took in all."""

    texts: list[StreamedAnswer] = field(default_factory=list)
    pictures: list[StreamedAnswer] = field(default_factory=list)
    picture_seconds: float = 0.0

    def add(self, other: "Outcome") -> None:
        self.texts += other.texts
        self.pictures += other.pictures
        self.picture_seconds += other.picture_seconds

    def figures(self) -> Figures:
        gaps = [gap for answer in self.texts for gap in answer.gaps]
        firsts = [answer.first for answer in self.texts]
        return {
            "text_itl_ms_p50": statistics.median(gaps) * 1e3,
            "text_itl_ms_p99": percentile(gaps, 99) * 1e3,
            "text_ttft_ms_p50": statistics.median(firsts) * 1e3,
            "text_ttft_ms_p99": percentile(firsts, 99) * 1e3,
            "texts": len(self.texts),
            "picture_ttft_ms_p50": statistics.median(answer.first for answer in self.pictures) * 1e3,
            "pictures_per_second": len(self.pictures) / self.picture_seconds,
            "pictures": len(self.pictures),
        }


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class TextStreams:
    """Clients that stream short texts until they are told to stop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = False
        self._pool = ThreadPoolExecutor(NUM_STREAMS)

    def __enter__(self) -> "TextStreams":
        self._running = [self._pool.submit(self._stream) for _ in range(NUM_STREAMS)]
        return self

    def __exit__(self, *_: object) -> None:
        self.answers = self._stop()

    def _stop(self) -> list[StreamedAnswer]:
        self._is_over = True
        with self._pool:
            return [answer for running in self._running for answer in running.result()]

    def _stream(self) -> list[StreamedAnswer]:
        answers = []
        while not self._is_over:
            answers.append(ask(self._url, MODEL, new_text(), TEXT_TOKENS))
        return answers


def new_text() -> Content:
    return [
        {"type": "text", "text": f"Number {next(_numbers)}: what is there, what is not, and what else may there be?"}
    ]


def new_picture(photo: bytes) -> Content:
    """Returns a question about a picture whose bytes no other request has: a decoder ignores what follows the end."""
    return [picture_part(photo + str(next(_numbers)).encode()), {"type": "text", "text": "What is in the picture?"}]


def capacity(
    url: str, photo: bytes, *, concurrency: int = CAPACITY_CONCURRENCY, num_pictures: int = CAPACITY_PICTURES
) -> float:
    """Returns how many pictures a second the machine holds beside the text, with so many under way."""
    warm_up, contents = ([new_picture(photo) for _ in range(count)] for count in (concurrency, num_pictures))
    with TextStreams(url):
        ask_all(url, MODEL, warm_up, PICTURE_TOKENS, concurrency=concurrency)
        _, seconds = ask_all(url, MODEL, contents, PICTURE_TOKENS, concurrency=concurrency)
    return len(contents) / seconds


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Returns moments in [0, seconds) at which pictures arrive: `rate` a second on average, each at random."""
    count, draw = max(1, round(rate * seconds)), random.Random(seed)
    return sorted(draw.uniform(0, seconds) for _ in range(count))


def run_load(url: str, photo: bytes, moments: list[float], seconds: float) -> Outcome:
    pictures: list[StreamedAnswer] = []
    started = time.perf_counter()

    def send(moment: float) -> None:
        time.sleep(max(0.0, started + moment - time.perf_counter()))
        pictures.append(ask(url, MODEL, new_picture(photo), PICTURE_TOKENS))

    with TextStreams(url) as texts, ThreadPoolExecutor(len(moments)) as pool:
        sent = [pool.submit(send, moment) for moment in moments]
        for one in sent:
            one.result()
        took = time.perf_counter() - started
        time.sleep(max(0.0, seconds - took))
    return Outcome(texts.answers, pictures, max(seconds, took))


def run_schedules(folder: Path, options: argparse.Namespace) -> dict[float, dict[str, Outcome]]:
    """Serves the model with each schedule in turns, and returns the outcomes of each load."""
    outcomes = {load: {name: Outcome() for name in SCHEDULES} for load in LOADS}
    photo, rate = photograph(2048, 2048), None
    for turn in range(options.rounds):
        for name in sorted(SCHEDULES, reverse=turn % 2 == 0):
            with running_app(app_config(folder, SCHEDULES[name]), host="127.0.0.1", port=free_port()) as url:
                measured = capacity(url, photo)  # also warms up
                rate = measured if rate is None else rate
                print(f"{name}: {measured:.2f} pictures a second beside text")
                for load in LOADS:
                    moments = arrivals(load * rate, options.seconds, seed=turn)
                    outcome = run_load(url, photo, moments, options.seconds)
                    outcomes[load][name].add(outcome)
                    print(f"{load} {name}: {shown(outcome.figures())}", flush=True)
    return outcomes


def app_config(folder: Path, engine: dict[str, Any]) -> AppConfig:
    """Returns settings with which nothing waits but in the stages: one client here stands for many."""
    room = {"requests": 4096, "pixels": 2**40, "bytes": 2**40, "tokens": 2**40}
    return AppConfig.model_validate(
        {
            "model": str(folder),
            "served_model_name": MODEL,
            "admission": {"total": room, "per_key": room},
            "preprocess": {"max_replicas": 1},  # a second one would start in the middle, and have no core
            "generate": {"engine": engine},
        }
    )


def shown(figures: Figures) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items())


def ratios(outcomes: dict[str, Outcome]) -> dict[str, Figures]:
    figures = {name: outcome.figures() for name, outcome in outcomes.items()}
    ratio = {metric: figures["new"][metric] / figures["old"][metric] for metric in TARGETS}
    return {
        name: {metric: round(value, 3) for metric, value in own.items()}
        for name, own in (*figures.items(), ("ratio", ratio))
    }


def checks_of(results: dict[str, dict[str, dict[str, Figures]]]) -> dict[str, dict[str, Any]]:
    checks = {}
    for shape, load in itertools.product(results, map(str, LOADS)):
        for metric, target in TARGETS.items():
            value = results[shape][load]["ratio"][metric]
            check = at_least if metric.endswith("_per_second") else at_most
            checks[f"{shape}, load {load}: {metric}"] = check(value, target)
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each load (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="only this one (default: all)")
    parser.add_argument("--output", type=Path, help="also write the JSON document there")
    options = parser.parse_args()
    results = {}
    for shape in options.shape or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            SHAPES[shape](Path(folder))
            outcomes = run_schedules(Path(folder), options)
        results[shape] = {str(load): ratios(own) for load, own in outcomes.items()}
    for shape, loads in results.items():
        for load, own in loads.items():
            for name, figures in own.items():
                print(f"{shape}, load {load}, {name}: {shown(figures)}")
    publish({"checks": checks_of(results), "measured": results, "machine": this_machine()}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
