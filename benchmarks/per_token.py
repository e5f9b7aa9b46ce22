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

import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import add_requests, run_to_end
from benchmarks.document import at_most, make_parser, publish, this_machine
from benchmarks.parallel_streams import stream_together
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.server_process import Server, cpu_seconds, replica_of, running_serve, thread_cpu_seconds
from benchmarks.streaming_client import Content, ask
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
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


class Served:
    def __init__(self, url: str, server: Server) -> None:
        self.url = url
        self._ingress, self._generate = (replica_of(server, name) for name in ("Ingress", "Generate"))
        self._steps = self._count_steps()

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
        (seconds, number), self._steps = self._steps, self._count_steps()
        return (self._steps[0] - seconds) / (self._steps[1] - number) * 1e3

    def _count_steps(self) -> tuple[float, float]:
        """Returns the seconds and the number of all engine steps so far."""
        return exported(self.url, "engine_step_seconds"), exported(self.url, "engine_steps")

    def _cpu_seconds(self) -> dict[str, float]:
        """Returns the CPU time of both replicas, and of each Generate thread by its number."""
        threads = thread_cpu_seconds(self._generate)
        whole = {"ingress": cpu_seconds(self._ingress), "generate": cpu_seconds(self._generate)}
        return whole | {str(number): seconds for number, seconds in threads.items()}


def step_alone(engine: LLMEngine, num_prompt_tokens: int, num_streams: int, num_tokens: int) -> float:
    """Returns the mean step of an engine that answers prompts, in milliseconds."""
    before = engine.stats
    prompts = [[10 + next(_numbers) % 200, *range(10, 9 + num_prompt_tokens)] for _ in range(num_streams)]
    add_requests(engine, prompts, num_tokens)
    run_to_end(engine)
    after = engine.stats
    seconds = sum(after.step_seconds.values()) - sum(before.step_seconds.values())
    return seconds / (after.num_steps - before.num_steps) * 1e3


def measure(served: Served, engine: LLMEngine, rounds: int) -> dict[str, Figures]:
    """Returns the medians of the server and of the engine alone, by the number of streams."""
    measured: dict[int, list[Figures]] = {count: [] for count in STREAMS}
    num_prompt_tokens = ask(served.url, MODEL, new_text(), 1).prompt_tokens
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


def main() -> None:
    options = make_parser(__doc__, rounds=3).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        settings = {"model": folder, "served_model_name": MODEL, "num_threads": NUM_THREADS}
        with running_serve(settings | {"generate": {"engine": ENGINE}}) as (url, server):
            engine = LLMEngine(EngineConfig(folder, num_threads=NUM_THREADS, **ENGINE))
            measured = measure(Served(url, server), engine, options.rounds)
    for count, figures in measured.items():
        print(f"{count:>2} streams {figures}")
    ratio = measured["8"]["step_ms"] / measured["8"]["step_alone_ms"]
    checks = {"step in the server over alone, 8 streams": at_most(round(ratio, 3), STEP_RATIO)}
    machine = this_machine(num_threads=NUM_THREADS)
    publish({"checks": checks, "measured": measured, "machine": machine}, options.output)


if __name__ == "__main__":
    main()
