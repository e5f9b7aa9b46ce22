"""What a token of running streams takes: processor time of Ingress and Generate, the step in the server, and the gaps.

    git worktree add --detach OLD COMMIT      a tree to compare with; build its kernels there
    python -m benchmarks.per_token [--old OLD] [--rounds 3] [--output FILE]

`new` is the tree of this file, `old` that of `--old`. Both serve one checkpoint of random weights, with 40 million
parameters in its language half, as processes of their own on this machine. In each round each of them answers 1, 8 and
32 streams of text, in turns, and the order changes from round to round. `alone` is this tree's engine in this process,
which answers as many prompts of the same length while the servers rest. Figures are medians of all rounds.

All figures but the step's are of the time in which all streams run. So no prompt, and no beginning or end of a request,
is in them. `ingress_ms` and `generate_ms` are processor time of the whole replica for each token, and
`generate_beside_engine_ms` that of all threads of Generate but the busiest, which is the engine's. `step_ms` is the
mean step of the engine, of prompts, too. Gaps are between pieces of a stream's text, as the client receives them:
tokens of one piece have one gap, and `tokens_per_piece` tells how many there are. The client is one thread of this
process, which reads the answers after their end.

Both trees run with one thread in the engine, because the second core is the ingress's and the client's, and without
guesses by prompt lookup, which either tree may lack. A tree may differ in anything else: where its kernels are slower,
its steps, `generate_ms`, and gaps are longer for that reason, too. `ingress_ms` and `generate_beside_engine_ms` tell
of the way of a token through the server alone.

A ratio is that of the new tree over the old one, and for the step that of the new server over the engine alone. Without
`--old`, only the latter is checked. The last line is one JSON document.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.document import publish, this_machine
from benchmarks.parallel_streams import stream_together
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.server_process import Server, cpu_seconds, replica_of, running_tree, thread_cpu_seconds
from benchmarks.two_trees import add_old_option, commit_of, trees_of
from benchmarks.vllm_cpu import MODEL, REPORT_SECONDS, StepCounts, count_prompt_tokens, new_content, step_alone
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine

STREAMS = {1: 512, 8: 256, 32: 192}
"""Numbers of streams, and how many tokens each answer has."""
STEP_RATIO, INGRESS_RATIO, GAP_RATIO = 1.1, 0.5, 1.0
GAPS = (50, 90, 99)
"""Percentiles."""
NUM_THREADS = 1
ENGINE: dict[str, Any] = {"prompt_lookup": False}
"""Settings of the engine."""

Figures = dict[str, float]


class ServedTree:
    """A server of one tree."""

    def __init__(self, url: str, server: Server) -> None:
        self.url = url
        self._ingress, self._generate = (replica_of(server, name) for name in ("Ingress", "Generate"))
        self._steps = StepCounts.of(url)

    def answer(self, num_streams: int, num_tokens: int) -> Figures:
        contents = [new_content("text") for _ in range(num_streams)]
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
        """Returns milliseconds of the mean step since the last call. Call it REPORT_SECONDS after the last token."""
        before, self._steps = self._steps, StepCounts.of(self.url)
        return self._steps.mean_since(before)

    def _cpu_seconds(self) -> dict[str, float]:
        """Returns the processor time of both replicas, and of each thread of Generate by its number."""
        threads = thread_cpu_seconds(self._generate)
        whole = {"ingress": cpu_seconds(self._ingress), "generate": cpu_seconds(self._generate)}
        return whole | {str(number): seconds for number, seconds in threads.items()}


def write_config(checkpoint: Path, tree: Path, file: Path) -> Path:
    """Writes the settings for the server of `tree`, whose own `serve.yaml` says where NUM_THREADS stands."""
    (served,) = yaml.safe_load((tree / "serve.yaml").read_text())["applications"]
    args: dict[str, Any] = {"model": str(checkpoint), "served_model_name": MODEL, "generate": {"engine": {**ENGINE}}}
    place = args if "num_threads" in served["args"] else args["generate"]["engine"]
    place["num_threads"] = NUM_THREADS
    file.write_text(json.dumps({"applications": [{"import_path": served["import_path"], "args": args}]}))
    return file


def measure(trees: dict[str, ServedTree], engine: LLMEngine, rounds: int) -> dict[str, dict[str, Figures]]:
    """Returns the medians, by the number of streams and the side."""
    measured: dict[int, dict[str, list[Figures]]] = {count: {} for count in STREAMS}
    num_prompt_tokens = count_prompt_tokens(trees["new"].url)
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for count, num_tokens in STREAMS.items():
                sides = {name: trees[name].answer(count, num_tokens) for name in sorted(trees, reverse=turn % 2 == 1)}
                time.sleep(REPORT_SECONDS)
                for name, tree in trees.items():
                    sides[name]["step_ms"] = tree.step()
                sides["alone"] = {"step_ms": step_alone(engine, num_prompt_tokens, count, num_tokens)}
                if turn > 0:  # the first round warms up
                    for name, figures in sides.items():
                        measured[count].setdefault(name, []).append(figures)
    return {
        str(count): {
            name: {key: statistics.median(one[key] for one in own) for key in own[0]}
            for name, own in sorted(by_side.items())
        }
        for count, by_side in measured.items()
    }


def checks_of(measured: dict[str, dict[str, Figures]]) -> dict[str, Any]:
    ratios = {"step in the server over alone, 8 streams": (_ratio(measured["8"], "step_ms", "alone"), STEP_RATIO)}
    if all("old" in sides for sides in measured.values()):
        for count in ("8", "32"):
            ratios[f"ingress CPU over old, {count} streams"] = _ratio(measured[count], "ingress_ms"), INGRESS_RATIO
        for count, sides in measured.items():
            for percent in GAPS:
                ratios[f"gap p{percent} over old, {count} streams"] = _ratio(sides, f"gap_ms_p{percent}"), GAP_RATIO
    return {
        name: {"value": round(value, 3), "target": target, "ok": value <= target}
        for name, (value, target) in ratios.items()
    }


def _ratio(sides: dict[str, Figures], key: str, other: str = "old") -> float:
    return sides["new"][key] / sides[other][key]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_old_option(parser)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    paths = trees_of(options)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint = Path(folder) / "checkpoint"
        make_checkpoint(checkpoint)
        trees = {}
        for name, path in paths.items():
            config = write_config(checkpoint, path, Path(folder) / f"{name}.json")
            trees[name] = ServedTree(*stack.enter_context(running_tree(path, config)))
        engine = LLMEngine(EngineConfig(str(checkpoint), num_threads=NUM_THREADS, **ENGINE))
        measured = measure(trees, engine, options.rounds)
    rounded = {
        count: {name: {key: round(value, 4) for key, value in own.items()} for name, own in sides.items()}
        for count, sides in measured.items()
    }
    for count, sides in rounded.items():
        for name, own in sides.items():
            print(f"{count:>2} streams, {name:5} {own}")
    commits = {name: commit_of(path) for name, path in paths.items()}
    document = {
        "checks": checks_of(measured),
        "measured": rounded,
        "commits": commits,
        "machine": this_machine(num_threads=NUM_THREADS),
    }
    publish(document, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
