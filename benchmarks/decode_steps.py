"""Steps of the decode engine that only decode: with Raylens' kernels and without them, on several threads while cores
are busy, and with guessed tokens. `python -m benchmarks.llm` runs this."""

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.answers import PROMPT_TOKENS, Prompts, answer, compare
from raylens.cpu_kernels.library import VARIABLE
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.prompt_lookup import PromptLookup
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence
from raylens.llm.step_threads import StepThreads

STEPS = ((1, 42), (1, 300), (8, 42), (8, 300), (8, 1000), (16, 300))
"""Numbers of sequences that decode, and the position that each of them is at."""
LOADS = {
    "free": None,
    "busy": "while True: pass",
    "half busy": """
import time
while True:
    end = time.perf_counter() + 0.0005
    while time.perf_counter() < end: pass
    time.sleep(0.0005)""",
}
"""Programs that run on all cores but one."""
LOADED_STEPS = 600
SHARES = (0.0, 0.5, 0.8, 1.0)
"""Of guesses that are right."""


def make_engine(folder: Path, kernels: str = "", **settings: Any) -> LLMEngine:
    """Prompts come again in each round: without the prefix cache they are computed again, as `generate` does. Each
    token is computed by a step of its own."""
    own: dict[str, Any] = {"max_num_seqs": 32, "kv_cache_bytes": 2**28, "prefix_caching": False, "prompt_lookup": False}
    with mock.patch.dict(os.environ, {VARIABLE: kernels}):
        return LLMEngine(EngineConfig(str(folder), **(own | settings)))


def decode_step(engine: LLMEngine, num_sequences: int, position: int) -> Callable[[], object]:
    """A step that computes the token at `position` of each sequence, in blocks one behind the other."""
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
    """Milliseconds of steps with kernels and without them, best times in turns (ABBA), by the number of threads from 1
    to `max_threads`; a step with kernels may take fewer. A ratio is of the best numbers of each side.
    `num_weight_bytes`: what a step reads of the weights."""
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
                actions[key]()  # what the others have left in the processor's caches is gone
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


@torch.inference_mode()
def measure_threads(folder: Path) -> dict[str, Any]:
    """Milliseconds of steps that decode 8 sequences, with one thread, with two, and with as many as the engine
    chooses: while the other cores are free, while programs keep them busy, and while these rest half of the time, half
    a millisecond at once."""
    engine = make_engine(folder, num_threads=2)
    step, runner = decode_step(engine, 8, 300), engine._runner
    measured = {}
    for load, program in LOADS.items():
        with _on_all_other_cores(program):
            for name in ("1", "2", "chosen"):
                runner._threads = StepThreads(1 if name == "1" else 2)
                if name == "2":
                    runner._threads.next_number = lambda: 2  # type: ignore[method-assign]
                times = []
                for _ in range(LOADED_STEPS):
                    start = time.perf_counter()
                    step()
                    times.append((time.perf_counter() - start) * 1e3)
                percentiles = statistics.quantiles(times[LOADED_STEPS // 3 :], n=100)
                measured[f"{load}, {name}"] = {"p50_ms": round(percentiles[49], 3), "p99_ms": round(percentiles[98], 3)}
    return measured


@contextmanager
def _on_all_other_cores(program: str | None) -> Iterator[None]:
    count = 0 if program is None else (os.cpu_count() or 1) - 1
    processes = [subprocess.Popen([sys.executable, "-c", program or ""]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class KnownAnswer(PromptLookup):
    """Guesses the answer's next tokens, of which the given share is right."""

    share = 1.0
    answers: Prompts = []

    def guess(self, max_tokens: int) -> list[int]:
        end = len(self._token_ids)
        if end < self._resumes_at:
            return []
        whole = next(own for own in self.answers if own[:PROMPT_TOKENS] == self._token_ids[:PROMPT_TOKENS])
        coming = whole[end : end + min(max_tokens, self._length)]
        return [token if self._is_right(end + index) else token ^ 1 for index, token in enumerate(coming)]

    def _is_right(self, position: int) -> bool:
        return random.Random(position).random() < self.share


def measure_prompt_lookup(folder: Path, prompts: Prompts, rounds: int) -> dict[str, Any]:
    """Tokens a second with guesses over those without, best times in turns, by how many guesses are right. `none`:
    nothing in the texts repeats, and nothing is guessed."""
    engine = make_engine(folder, prompt_lookup=True)
    measured = {}

    def ask(own: Prompts, *, is_on: bool) -> Prompts:
        engine._looks_up = is_on  # one engine, because two of them lie differently in memory
        return answer(engine, own)

    def compare_with(lookup: type[PromptLookup], own: Prompts) -> dict[str, Any]:
        with mock.patch("raylens.llm.engine.PromptLookup", lookup):
            compared = compare(lambda: ask(own, is_on=True), lambda: ask(own, is_on=False), rounds)
        return {name: compared[name] for name in ("ratio", "equal")}

    for count in (1, 8):
        own = prompts[:count]
        measured[f"{count}, none"] = compare_with(PromptLookup, own)
        answers = ask(own, is_on=False)
        KnownAnswer.answers = [prompt + coming for prompt, coming in zip(own, answers, strict=True)]
        for KnownAnswer.share in SHARES:
            measured[f"{count}, {KnownAnswer.share:.0%} right"] = compare_with(KnownAnswer, own)
    return measured
