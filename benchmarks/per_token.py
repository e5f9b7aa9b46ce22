"""What a token of running streams takes: processor time of Ingress and Generate, the step in the server, and the gaps.

    python -m benchmarks.per_token [--rounds 3] [--output FILE]

A server of a checkpoint of random weights, with 40 million parameters in its language half, answers 1, 8 and 32 streams
of text in each round. `alone` is an engine in this process, which answers as many prompts of the same length while the
server rests. Figures are medians of all rounds.

All figures but the step's are of the time in which all streams run. So no prompt, and no beginning or end of a request,
is in them. `ingress_ms` and `generate_ms` are processor time of the whole replica for each token, and
`generate_beside_engine_ms` that of all threads of Generate but the busiest, which is the engine's. `step_ms` is the
mean step of the engine, of prompts, too. Gaps are between pieces of a stream's text, as the client receives them:
tokens of one piece have one gap, and `tokens_per_piece` tells how many there are. The client is one thread of this
process, which reads the answers after their end.

Engines have one thread, because the second core is the ingress's and the client's, and guess no tokens by prompt
lookup. `ingress_ms` and `generate_beside_engine_ms` tell of the way of a token through the server alone. The last line
is one JSON document.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.document import at_most, publish, this_machine
from benchmarks.parallel_streams import stream_together
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.server_process import IMPORT_PATH, Server, cpu_seconds, replica_of, running_serve, thread_cpu_seconds
from benchmarks.streaming_client import Content
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ProcessedPrompt
from tests.metric_values import exported

MODEL = "random"
STREAMS = {1: 512, 8: 256, 32: 192}
"""Numbers of streams, and how many tokens each answer has."""
STEP_RATIO = 1.1
"""The step in the server over that of the engine alone, at most."""
GAPS = (50, 90, 99)
"""Percentiles."""
NUM_THREADS = 1
ENGINE: dict[str, Any] = {"prompt_lookup": False}

Figures = dict[str, float]
_numbers = itertools.count()


def new_text() -> Content:
    """Returns a message that no other request brings."""
    return [{"type": "text", "text": f"Number {next(_numbers)}: what is in the picture, and what is not?"}]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How many steps a server's engine has made, and their seconds."""

    seconds: float
    number: float

    @classmethod
    def of(cls, url: str) -> Self:
        return cls(exported(url, "engine_step_seconds"), exported(url, "engine_steps"))

    def mean_since(self, before: "StepCounts") -> float:
        """Returns milliseconds of the mean step."""
        return (self.seconds - before.seconds) / (self.number - before.number) * 1e3


class Served:
    """A server of the checkpoint."""

    def __init__(self, url: str, server: Server) -> None:
        self.url = url
        self._ingress, self._generate = (replica_of(server, name) for name in ("Ingress", "Generate"))
        self._steps = StepCounts.of(url)

    def answer(self, num_streams: int, num_tokens: int) -> Figures:
        contents = [new_text() for _ in range(num_streams)]
        came = stream_together(self.url, MODEL, contents, num_tokens, self._cpu_seconds)
        names = came.begin.keys() & came.end.keys()
        cpu = {name: (came.end[name] - came.begin[name]) / came.num_tokens * 1e3 for name in names}
        threads = [seconds for name, seconds in cpu.items() if name not in ("ingress", "generate")]
        percentiles = statistics.quantiles(came.gaps, n=100)
        return {
            "ingress_ms": cpu["ingress"],
            "generate_ms": cpu["generate"],
            "generate_beside_engine_ms": cpu["generate"] - max(threads),
            **{f"gap_ms_p{percent}": percentiles[percent - 1] * 1e3 for percent in GAPS},
            "tokens_per_second": came.num_tokens / came.seconds,
            "tokens_per_piece": came.num_tokens / came.num_pieces,
        }

    def step(self) -> float:
        """Returns milliseconds of the mean step since the last call."""
        before, self._steps = self._steps, StepCounts.of(self.url)
        return self._steps.mean_since(before)

    def _cpu_seconds(self) -> dict[str, float]:
        """Returns the processor time of both replicas, and of each thread of Generate by its number."""
        threads = thread_cpu_seconds(self._generate)
        whole = {"ingress": cpu_seconds(self._ingress), "generate": cpu_seconds(self._generate)}
        return whole | {str(number): seconds for number, seconds in threads.items()}


def step_alone(engine: LLMEngine, num_prompt_tokens: int, num_streams: int, num_tokens: int) -> float:
    """Returns milliseconds of the mean step of an engine that answers prompts."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    before = engine.stats
    for index in range(num_streams):
        first = 10 + next(_numbers) % 200
        prompt = ProcessedPrompt([first, *range(10, 9 + num_prompt_tokens)], [], [])
        engine.add_request(str(index), prompt, [], params)
    while engine.has_unfinished():
        engine.step()
    after = engine.stats
    seconds = sum(after.step_seconds.values()) - sum(before.step_seconds.values())
    return seconds / (after.num_steps - before.num_steps) * 1e3


def count_prompt_tokens(url: str) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": new_text()}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return int(json.load(response)["usage"]["prompt_tokens"])


def measure(served: Served, engine: LLMEngine, rounds: int) -> dict[str, Figures]:
    """Returns the medians of the server and of the engine alone, by the number of streams."""
    measured: dict[int, list[Figures]] = {count: [] for count in STREAMS}
    num_prompt_tokens = count_prompt_tokens(served.url)
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for count, num_tokens in STREAMS.items():
                figures = served.answer(count, num_tokens)
                figures["step_ms"] = served.step()
                figures["step_alone_ms"] = step_alone(engine, num_prompt_tokens, count, num_tokens)
                if turn > 0:  # the first round warms up
                    measured[count].append(figures)
    return {
        str(count): {key: round(statistics.median(one[key] for one in own), 4) for key in own[0]}
        for count, own in measured.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, config = Path(folder) / "checkpoint", Path(folder) / "config.json"
        make_checkpoint(checkpoint)
        args = {"model": str(checkpoint), "served_model_name": MODEL, "num_threads": NUM_THREADS}
        args["generate"] = {"engine": ENGINE}
        config.write_text(json.dumps({"applications": [{"import_path": IMPORT_PATH, "args": args}]}))
        with running_serve(config) as (url, server):
            engine = LLMEngine(EngineConfig(str(checkpoint), num_threads=NUM_THREADS, **ENGINE))
            measured = measure(Served(url, server), engine, options.rounds)
    for count, figures in measured.items():
        print(f"{count:>2} streams {figures}")
    ratio = measured["8"]["step_ms"] / measured["8"]["step_alone_ms"]
    checks = {"step in the server over alone, 8 streams": at_most(round(ratio, 3), STEP_RATIO)}
    machine = this_machine(num_threads=NUM_THREADS)
    publish({"checks": checks, "measured": measured, "machine": machine}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
