"""Decode-only steps of the engine, with Raylens' kernels and without: a part of `benchmarks.llm`."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from raylens.cpu_kernels.library import VARIABLE
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence

STEPS = ((1, 42), (1, 300), (8, 42), (8, 300), (8, 1000), (16, 300))
"""(decoding sequences, position of each)."""


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
