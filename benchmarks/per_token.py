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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import add_requests, run_to_end
from benchmarks.document import at_most, make_parser, publish, this_machine
from benchmarks.pictures import new_content
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.server_process import Server, cpu_seconds, replica_of, running_serve, thread_cpu_seconds
from benchmarks.streaming_client import Content, Sending, Stream, ask, events_of, run_streams, text_of
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


@dataclass(frozen=True, slots=True)
class ParallelAnswers:
    """The pieces received while all streams ran: from `begin`, the first text of the last stream to start, to `end`,
    the last text of the first stream to finish. `seconds`: this duration. `gaps`: seconds between pieces of text of the
    same stream; data received at once is one piece. `num_tokens`: all streams' tokens of this duration, by their share
    of the text."""

    begin: Figures
    end: Figures
    seconds: float
    gaps: list[float]
    num_pieces: int
    num_tokens: float


class Marks:
    """Calls a function when the last stream begins, and when the first stream ends."""

    def __init__(self, num_streams: int, at_mark: Callable[[], Figures]) -> None:
        self._num_streams = num_streams
        self._at_mark = at_mark
        self._begun: set[int] = set()
        self.begin: tuple[float, Figures] | None = None
        self.end: tuple[float, Figures] | None = None

    def on_data(self, stream: Stream) -> None:
        moment, data = stream.received[-1]
        if b"data: {" in data:
            self._begun.add(id(stream))
        if self.begin is None and len(self._begun) == self._num_streams:
            self.begin = moment, self._at_mark()
        if self.end is None and b'"finish_reason":"' in data:
            self.end = moment, self._at_mark()


def stream_together(
    url: str, contents: Sequence[Content], num_tokens: int, at_mark: Callable[[], Figures]
) -> ParallelAnswers:
    """Streams greedy answers of exactly `num_tokens` tokens concurrently. Calls `at_mark` at the begin and at the end
    of the time in which all of them run. Raises RuntimeError if there is no such time, or for a wrong answer."""
    marks = Marks(len(contents), at_mark)
    sendings = [Sending.of(0.0, MODEL, content, num_tokens) for content in contents]
    streams = run_streams(url, sendings, marks.on_data)
    if marks.begin is None or marks.end is None or marks.begin[0] >= marks.end[0]:
        raise RuntimeError(f"{len(streams)} streams never ran all at once: ask for more tokens")
    (begin_time, begin), (end_time, end) = marks.begin, marks.end
    gaps, num_pieces, tokens = list[float](), 0, 0.0
    for stream in streams:
        pieces = list(_pieces(stream, num_tokens))
        within = [(moment, length) for moment, length in pieces if begin_time <= moment <= end_time]
        gaps += [after[0] - before[0] for before, after in itertools.pairwise(within)]
        num_pieces += len(within)
        tokens += num_tokens * sum(length for _, length in within) / sum(length for _, length in pieces)
    return ParallelAnswers(begin, end, end_time - begin_time, gaps, num_pieces, tokens)


def _pieces(stream: Stream, num_tokens: int) -> Iterator[tuple[float, int]]:
    """Yields the time of each piece of text and its length in characters."""
    usage = None
    for moment, events in events_of(stream.received):
        length = len(text_of(events))
        usage = next((event["usage"] for event in events if event.get("usage")), usage)
        if length:
            yield moment, length
    if usage is None or usage["completion_tokens"] != num_tokens:
        raise RuntimeError(f"a stream ended with {usage}, not with {num_tokens} tokens")


class Served:
    def __init__(self, url: str, server: Server) -> None:
        self.url = url
        self._ingress, self._generate = (replica_of(server, name) for name in ("Ingress", "Generate"))
        self._steps = self._count_steps()

    def answer(self, num_streams: int, num_tokens: int) -> Figures:
        contents = [new_content() for _ in range(num_streams)]
        came = stream_together(self.url, contents, num_tokens, self._cpu_seconds)
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
    num_prompt_tokens = ask(served.url, MODEL, new_content(), 1).prompt_tokens
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
