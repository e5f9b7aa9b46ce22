"""The decode engine against Hugging Face `generate`, on the CPU and on one checkpoint with random weights.

    python -m benchmarks.llm [--rounds 10] [--threads 2] [--output FILE]

The language half has about 40 million parameters. Prompts have 128 tokens; answers have 64 new tokens, greedy, float32.
Both engines answer the same prompts in turns, in one run: batches of 1 and 8, and 32 concurrent requests against
sequential calls of `generate`.

`overhead` is the time of `LLMEngine.step` beyond the model's forward pass in a step that decodes 8 sequences:
scheduling, the layout of the step, sampling. `steps` compares steps with and without Raylens' kernels, in turns, by the
number of sequences and their position; each side uses its best number of threads. `read_share` is the speed at which a
step of one sequence reads the weights, relative to a plain sum over memory of that size, measured beside it.

Neither side converts tokens to text. The last line is one JSON document. Checks are ratios of best times, because other
programs use the machine, too.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlavaForConditionalGeneration

from benchmarks.answers import Prompts, add_requests, answer, generate, make_prompts
from benchmarks.document import at_least, at_most, make_parser, publish, this_machine
from benchmarks.random_checkpoint import make_checkpoint
from raylens.cpu_kernels.library import VARIABLE
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence

PROMPT_TOKENS, NEW_TOKENS = 128, 64
TARGETS = {"batch_1": 1.2, "batch_8": 1.5, "concurrent_32": 3.0}
"""Minimum ratio of tokens per second to `generate`."""
OVERHEAD_MS = 0.3
STEP_RATIO, READ_SHARE = 2.2, 0.7
"""Minimum speed-up of steps by the kernels, and minimum share of the memory's speed."""
STEPS = ((1, 42), (1, 300), (8, 42), (8, 300), (8, 1000), (16, 300))
"""(decoding sequences, position of each)."""


def compare(ours: Callable[[], Prompts], theirs: Callable[[], Prompts], rounds: int) -> dict[str, Any]:
    """Compares tokens per second of both, in turns, by best times, and whether all tokens were equal."""
    times: tuple[list[float], list[float]] = ([], [])
    is_equal = True
    for _ in range(rounds):
        answers = []
        for side, own_times in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            answers.append(side())
            own_times.append(time.perf_counter() - start)
        is_equal &= answers[0] == answers[1]
    num_tokens = sum(map(len, answers[0]))
    our_time, their_time = map(min, times)
    return {
        "tokens_per_second": round(num_tokens / our_time, 1),
        "generate_tokens_per_second": round(num_tokens / their_time, 1),
        "ratio": round(their_time / our_time, 3),
        "equal": is_equal,
    }


@torch.inference_mode()
def measure_overhead(engine: LLMEngine, prompts: Prompts) -> dict[str, float]:
    """Returns median milliseconds of a step that decodes all `prompts`: total, forward pass, and difference."""
    forward, spent = engine._runner.forward, 0.0

    def timed_forward(*args: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        result = forward(*args)
        spent = time.perf_counter() - start
        return result

    engine._runner.forward = timed_forward  # type: ignore[assignment]
    steps = []
    add_requests(engine, prompts, NEW_TOKENS)
    while engine.has_unfinished():
        start = time.perf_counter()
        outputs = engine.step()
        step = time.perf_counter() - start
        if len(outputs) == len(prompts) and outputs[0].num_output_tokens > 1:
            steps.append((step, spent))
    engine._runner.forward = forward
    return {
        "step_ms": round(statistics.median(step for step, _ in steps) * 1e3, 3),
        "forward_ms": round(statistics.median(own for _, own in steps) * 1e3, 3),
        "overhead_ms": round(statistics.median(step - own for step, own in steps) * 1e3, 3),
    }


def make_engine(folder: Path, kernels: str = "", **settings: Any) -> LLMEngine:
    """Without the prefix cache, because prompts repeat in each round and `generate` recomputes them, too. Without
    prompt lookup, so each token takes one step."""
    own: dict[str, Any] = {"max_num_seqs": 32, "kv_cache_bytes": 2**28, "prefix_caching": False, "prompt_lookup": False}
    with mock.patch.dict(os.environ, {VARIABLE: kernels}):
        return LLMEngine(EngineConfig(str(folder), **(own | settings)))


def decode_step(engine: LLMEngine, num_sequences: int, position: int) -> Callable[[], object]:
    """Returns a step that computes the token at `position` of each sequence, with consecutive blocks."""
    blocks = -(-(position + 1) // 16)
    chunks = []
    for index in range(num_sequences):
        sequence = Sequence(str(index), [10 + index] * (position + 1), position, [], position + 2)
        sequence.block_table = list(range(index * blocks, (index + 1) * blocks))
        sequence.num_computed_tokens = position
        chunks.append(ScheduledChunk(sequence, 1))
    return lambda: engine._runner.run(chunks)


@torch.inference_mode()
def measure_steps(folder: Path, rounds: int, num_weight_bytes: int, max_threads: int) -> dict[str, Any]:
    """Returns milliseconds of steps with and without kernels, best times in turns (ABBA), by the number of threads from
    1 to `max_threads`; a step with kernels may use fewer. `ratio` compares the best thread counts of each side.
    `num_weight_bytes`: weights read by a step."""
    sides = {"kernels": "", "pytorch": "off"}
    numbers = range(1, max_threads + 1)
    engines = {
        (side, threads): make_engine(folder, kernels, num_threads=threads)
        for side, kernels in sides.items()
        for threads in numbers
    }
    memory = torch.ones(num_weight_bytes // 4)
    measured: dict[str, Any] = {}
    for num_sequences, position in STEPS:
        actions: dict[tuple[str, int], Callable[[], object]] = {
            key: decode_step(engine, num_sequences, position) for key, engine in engines.items()
        }
        actions |= {("read", threads): memory.sum for threads in numbers}
        times: dict[tuple[str, int], list[float]] = {key: [] for key in actions}
        for turn in range(2 * rounds):
            for key in sorted(actions, reverse=turn % 2 == 1):
                torch.set_num_threads(key[1])
                actions[key]()  # warms the CPU caches, which the other side has filled
                start = time.perf_counter()
                actions[key]()
                times[key].append(time.perf_counter() - start)
        milliseconds = {
            name: {threads: round(min(times[name, threads]) * 1e3, 3) for threads in numbers}
            for name in (*sides, "read")
        }
        best = {name: min(own.values()) for name, own in milliseconds.items()}
        measured[f"{num_sequences}x{position}"] = {
            **{f"{name}_ms": own for name, own in milliseconds.items()},
            "ratio": round(best["pytorch"] / best["kernels"], 3),
            "read_share": round(best["read"] / best["kernels"], 3),
        }
    return measured


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    num_parameters = make_checkpoint(folder)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    engine = make_engine(folder)
    prompts = make_prompts(32, PROMPT_TOKENS)

    def ours(count: int) -> Prompts:
        return answer(engine, prompts[:count], NEW_TOKENS)

    def theirs(batches: list[Prompts]) -> Prompts:
        return [own for batch in batches for own in generate(model, batch, NEW_TOKENS)]

    ours(32)
    theirs([prompts[:8]])
    # A step reads only one row of the embedding per token.
    num_weights = num_parameters - model.get_input_embeddings().weight.numel()
    threads = torch.get_num_threads()
    steps = measure_steps(folder, rounds, num_weights * 4, threads)
    torch.set_num_threads(threads)
    return {
        "parameters": num_parameters,
        "steps": steps,
        "batch_1": compare(lambda: ours(1), lambda: theirs([prompts[:1]]), rounds),
        "batch_8": compare(lambda: ours(8), lambda: theirs([prompts[:8]]), rounds),
        "concurrent_32": compare(lambda: ours(32), lambda: theirs([[prompt] for prompt in prompts]), 1),
        "overhead": min((measure_overhead(engine, prompts[:8]) for _ in range(rounds)), key=lambda o: o["overhead_ms"]),
    }


def checks_of(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    checks: dict[str, dict[str, Any]] = {}
    checks |= {name: at_least(measured[name]["ratio"], target) for name, target in TARGETS.items()}
    checks["overhead_ms"] = at_most(measured["overhead"]["overhead_ms"], OVERHEAD_MS)
    for name, step in measured["steps"].items():
        checks[f"step {name}"] = at_least(step["ratio"], STEP_RATIO)
        if name.startswith("1x"):
            checks[f"read share {name}"] = at_least(step["read_share"], READ_SHARE)
    checks["equal_tokens"] = at_least(sum(measured[name]["equal"] for name in TARGETS), len(TARGETS))
    return checks


def main() -> None:
    parser = make_parser(__doc__, rounds=10)
    parser.add_argument("--threads", type=int, default=2, help="for both sides")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options.rounds)
    for name, figures in measured.items():
        print(f"{name}: {figures}")
    document = {"checks": checks_of(measured), "measured": measured, "machine": this_machine(threads=options.threads)}
    publish(document, options.output)


if __name__ == "__main__":
    main()
