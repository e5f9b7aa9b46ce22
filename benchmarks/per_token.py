"""The cost of a token of running streams: CPU time of Ingress and Generate, the server's step, and the gaps.

    python -m benchmarks.per_token [--rounds 3] [--output FILE]

A server of a checkpoint of random weights, with 40 million parameters in its language half, answers 1, 8 and 32 streams
of text in each round. `alone` is an engine in this process, which answers as many prompts of the same length while the
server rests. Figures are medians of all rounds.

All figures but the step's cover the time in which all streams run, so they include no prompt, and no start or end of a
request. `ingress_ms` and `generate_ms` are the replica's total CPU time per token. `generate_beside_engine_ms` excludes
Generate's busiest thread, which is the engine's. `step_ms` is the engine's mean step, including prompts. Gaps are
between pieces of a stream's text, as received by the client: the tokens of one piece have one gap, and
`tokens_per_piece` is their number. The client is one thread of this process, which parses the answers after their end.

Engines have one thread, because the ingress and the client use the second core. Prompt lookup is off. Only `ingress_ms`
and `generate_beside_engine_ms` isolate a token's path through the server. The last line is one JSON document.
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
"""Tokens per answer, by the number of streams."""
STEP_RATIO = 1.1
"""Maximum ratio of the server's step to the engine's alone."""
GAPS = (50, 90, 99)
"""Percentiles."""
NUM_THREADS = 1
ENGINE: dict[str, Any] = {"prompt_lookup": False}

Figures = dict[str, float]
_numbers = itertools.count()


def new_text() -> Content:
    """Returns a message that no other request has."""
    return [{"type": "text", "text": f"Number {next(_numbers)}: what is in the picture, and what is not?"}]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """A server's engine steps: their total seconds and their number."""

    seconds: float
    number: float

    @classmethod
    def of(cls, url: str) -> Self:
        return cls(exported(url, "engine_step_seconds"), exported(url, "engine_steps"))

    def mean_since(self, before: "StepCounts") -> float:
        """Returns the mean step in milliseconds."""
        return (self.seconds - before.seconds) / (self.number - before.number) * 1e3


class Served:
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
        """Returns the mean step since the last call, in milliseconds."""
        before, self._steps = self._steps, StepCounts.of(self.url)
        return self._steps.mean_since(before)

    def _cpu_seconds(self) -> dict[str, float]:
        """Returns the CPU time of both replicas, and of each Generate thread by its number."""
        threads = thread_cpu_seconds(self._generate)
        whole = {"ingress": cpu_seconds(self._ingress), "generate": cpu_seconds(self._generate)}
        return whole | {str(number): seconds for number, seconds in threads.items()}


def step_alone(engine: LLMEngine, num_prompt_tokens: int, num_streams: int, num_tokens: int) -> float:
    """Returns the mean step of an engine that answers prompts, in milliseconds."""
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
