"""Measures two text streams while large pictures arrive: the delay of the text, and its cost for the pictures.

    python -m benchmarks.text_under_pictures [--seconds 20] [--rounds 2] [--output FILE]

Two checkpoints of random weights with 40 million parameters in the language half: a Qwen2.5-VL with 1,225 tokens per
picture, and a LLaVA with 576. Two clients continuously stream short texts: first alone, then while new pictures of 2048
x 2048 arrive at random times, at 0.5, 1 and 2 times the rate that the machine sustains beside the text. This rate is
measured first, at a fixed concurrency. Arrivals end after `--seconds`. The server then answers the remaining pictures
while text continues, and these answers count.

ITL is the time between two pieces of a text stream, TTFT the time from a request to its first piece. Throughput is
pictures per second from the first arrival to the last answer or to the end of arrivals, whichever is later.
`over_alone` is the ratio of the text's times to those of the text alone. The last line is one JSON document.
"""

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from benchmarks.document import make_parser, publish, this_machine
from benchmarks.pictures import new_content, photograph
from benchmarks.random_checkpoint import make_checkpoint, make_qwen_checkpoint
from benchmarks.streaming_client import Answer, Content, Sending, ask, ask_all, send_all
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.demo import picture_part
from raylens.deployments.launch.local_cluster import running_app
from raylens.planning.simulation import percentile

MODEL = "random"
SHAPES: dict[str, Callable[[Path], int]] = {
    "Qwen2.5-VL": make_qwen_checkpoint,
    "LLaVA": lambda folder: make_checkpoint(folder, image_size=336),
}
LOADS = (0.5, 1.0, 2.0)
NUM_STREAMS, TEXT_TOKENS, PICTURE_TOKENS = 2, 64, 8
CAPACITY_CONCURRENCY, CAPACITY_PICTURES = 4, 16
Figures = dict[str, float]
_numbers = itertools.count()


@dataclass
class Outcome:
    """The answers of one load, and the total seconds of the pictures."""

    texts: list[Answer] = field(default_factory=list)
    pictures: list[Answer] = field(default_factory=list)
    picture_seconds: float = 0.0

    def add(self, other: "Outcome") -> None:
        self.texts += other.texts
        self.pictures += other.pictures
        self.picture_seconds += other.picture_seconds

    def text_figures(self) -> Figures:
        gaps = [gap for answer in self.texts for gap in answer.gaps]
        firsts = [answer.ttft for answer in self.texts]
        return {
            "text_itl_ms_p50": statistics.median(gaps) * 1e3,
            "text_itl_ms_p99": percentile(gaps, 99) * 1e3,
            "text_ttft_ms_p50": statistics.median(firsts) * 1e3,
            "text_ttft_ms_p99": percentile(firsts, 99) * 1e3,
        }

    def figures(self) -> Figures:
        return self.text_figures() | {
            "picture_ttft_ms_p50": statistics.median(answer.ttft for answer in self.pictures) * 1e3,
            "pictures_per_second": len(self.pictures) / self.picture_seconds,
            "pictures": len(self.pictures),
        }


@contextmanager
def text_streams(url: str) -> Iterator[list[Answer]]:
    """Streams short texts to several clients while the block runs. The list has their answers after the block."""
    answers, is_over = list[Answer](), Event()

    def stream() -> None:
        while not is_over.is_set():
            answers.append(ask(url, MODEL, new_content(), TEXT_TOKENS))

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(stream) for _ in range(NUM_STREAMS)]
        try:
            yield answers
        finally:
            is_over.set()
        for one in running:
            one.result()


def new_picture(photo: bytes) -> Content:
    """Returns a question about a picture with unique bytes: decoders ignore bytes after the end."""
    return [picture_part(photo + str(next(_numbers)).encode()), {"type": "text", "text": "What is in the picture?"}]


def capacity(
    url: str, photo: bytes, *, concurrency: int = CAPACITY_CONCURRENCY, num_pictures: int = CAPACITY_PICTURES
) -> float:
    """Returns the pictures per second that the machine sustains beside the text, at this concurrency."""
    warm_up, contents = ([new_picture(photo) for _ in range(count)] for count in (concurrency, num_pictures))
    with text_streams(url):
        ask_all(url, MODEL, warm_up, PICTURE_TOKENS, concurrency=concurrency)
        _, seconds = ask_all(url, MODEL, contents, PICTURE_TOKENS, concurrency=concurrency)
    return len(contents) / seconds


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Returns random arrival times in [0, seconds), `rate` per second on average."""
    count, draw = max(1, round(rate * seconds)), random.Random(seed)
    return sorted(draw.uniform(0, seconds) for _ in range(count))


def run_load(url: str, photo: bytes, moments: list[float], seconds: float) -> Outcome:
    sendings = [Sending.of(moment, MODEL, new_picture(photo), PICTURE_TOKENS) for moment in moments]
    with text_streams(url) as texts:
        started = time.perf_counter()
        pictures, _ = send_all(url, sendings)
        took = time.perf_counter() - started
        time.sleep(max(0.0, seconds - took))
    return Outcome(texts, pictures, max(seconds, took))


def run_model(folder: Path, seconds: float, rounds: int) -> dict[str, Figures]:
    """Serves the model. Returns the figures of text alone and of each load, over all rounds."""
    alone, outcomes, photo = Outcome(), {load: Outcome() for load in LOADS}, photograph(2048, 2048)
    with running_app(app_config(folder), host="127.0.0.1", port=free_port()) as url:
        rate = capacity(url, photo)  # also warms up
        print(f"{rate:.2f} pictures a second beside text")
        for turn in range(rounds):
            with text_streams(url) as texts:
                time.sleep(seconds)
            alone.add(Outcome(texts))
            for load, outcome in outcomes.items():
                outcome.add(run_load(url, photo, arrivals(load * rate, seconds, seed=turn), seconds))
                print(f"{load}: {shown(outcome.figures())}", flush=True)
    figures = {"alone": alone.text_figures()}
    for load, outcome in outcomes.items():
        own = outcome.figures()
        figures[str(load)] = own
        figures[f"{load} over_alone"] = {name: own[name] / value for name, value in figures["alone"].items()}
    return {name: {metric: round(value, 3) for metric, value in own.items()} for name, own in figures.items()}


def app_config(folder: Path, **settings: Any) -> AppConfig:
    """Returns `settings` in which only the stages are a bottleneck: one client here stands for many."""
    room = {"requests": 4096, "pixels": 2**40, "bytes": 2**40, "tokens": 2**40}
    return AppConfig.model_validate(
        {
            "model": str(folder),
            "served_model_name": MODEL,
            "admission": {"total": room, "per_key": room},
            "preprocess": {"max_replicas": 1},  # a second one would start during the measurement, and have no core
            **settings,
        }
    )


def shown(figures: Figures) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items())


def main() -> None:
    parser = make_parser(__doc__, rounds=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each load (default: %(default)s)")
    options = parser.parse_args()
    results = {}
    for shape, make in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            results[shape] = run_model(Path(folder), options.seconds, options.rounds)
    for shape, own in results.items():
        for name, figures in own.items():
            print(f"{shape}, {name}: {shown(figures)}")
    publish({"measured": results, "machine": this_machine()}, options.output)


if __name__ == "__main__":
    main()
