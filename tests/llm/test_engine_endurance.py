"""Thousands of short requests, many of them aborted: nothing is lost, nothing piles up."""

import gc
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.torchvision_build import make_importable
from raylens.preprocess.schema import PlaceholderRange, ProcessedPrompt
from tests.small_models import make_checkpoint

CONCURRENCY, HIDDEN_SIZE = 48, 32
BEGINNINGS = [list(range(10 + i, 30 + i)) for i in range(5)]
"""Some prompts share these, others nothing."""


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


class Crowd:
    """Adds requests of all kinds to an engine and aborts some; counts what comes of them. `num_ahead`: how many steps
    were launched before the one in front of them was read."""

    def __init__(self, engine: LLMEngine, num_requests: int) -> None:
        self.engine = engine
        self.num_requests = num_requests
        self.num_ahead = 0
        # The host waits for the step of a scored prompt, before which no other is launched.
        self.num_unscored = 19 if engine._goes_ahead else 3
        self.random = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)
        self.num_added = self.num_aborted = 0
        self.running: set[str] = set()
        self.awaited: dict[str, torch.Tensor] = {}
        self.finished: dict[str, int] = {}

    def add(self) -> None:
        name = str(self.num_added)
        self.num_added += 1
        beginning = self.random.choice([*BEGINNINGS, []])
        token_ids = beginning + [self.random.randrange(10, 200) for _ in range(self.random.randint(1, 30))]
        prompt, embeddings = ProcessedPrompt(token_ids, [], []), []
        if self.random.random() < 0.3:
            length = self.random.randint(1, len(token_ids))
            item = torch.randn(length, HIDDEN_SIZE, generator=self.generator)
            item_hash = self.random.choice(["often seen", name])
            prompt = ProcessedPrompt(token_ids, [PlaceholderRange(0, length)], [item_hash])
            embeddings = [None]
            self.awaited[name] = item
        params = SamplingParams(
            max_tokens=self.random.randint(1, 8),
            temperature=self.random.choice([0.0, 1.0]),
            n=self.random.choice([1, 1, 1, 3]),
            frequency_penalty=self.random.choice([0.0, 0.5]),
            logprobs=self.random.choice([None, 2]),
            prompt_logprobs=self.random.choice([*[None] * self.num_unscored, 1]),
            stop=self.random.choice([(), ("a",)]),
        )
        self.engine.add_request(name, prompt, embeddings, params, cache_salt=self.random.choice(["", "tenant"]))
        self.running.add(name)

    def step(self) -> None:
        while self.num_added < self.num_requests and len(self.running) < CONCURRENCY:
            self.add()
        for name in list(self.awaited):
            if self.random.random() < 0.5:
                self.engine.set_embeddings(name, 0, self.awaited.pop(name))
        if self.running and self.random.random() < 0.5:
            self.abort(self.random.choice(sorted(self.running)))
        outputs = self.engine.step()
        self.num_ahead += self.engine._in_flight is not None
        for output in outputs:
            if output.finish_reason is not None:
                assert output.finish_reason in ("stop", "length")
                self.finished[output.request_id] = self.finished.get(output.request_id, 0) + 1
                if output.request_id not in self.engine._answers.requests:
                    self.running.discard(output.request_id)

    def abort(self, name: str) -> None:
        self.engine.abort(name)
        self.running.discard(name)
        self.awaited.pop(name, None)
        self.num_aborted += 1


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: what other modules have left there would come and go meanwhile."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=make_importable) as pool:
        yield pool


@pytest.mark.long
@pytest.mark.parametrize("num_requests", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "ahead"])
def test_thousands_of_requests_leave_nothing_behind(
    pool: ProcessPoolExecutor, tmp_path: Path, num_requests: int, is_ahead: bool
) -> None:
    pool.submit(endure, make_checkpoint("llava", tmp_path), num_requests, is_ahead).result()


def endure(checkpoint: str, num_requests: int, is_ahead: bool) -> None:
    # Too few blocks for all that run: some are preempted.
    config = EngineConfig(
        checkpoint,
        block_size=4,
        max_num_seqs=24,
        max_num_batched_tokens=128,
        max_decode_slowdown=None,  # else how many run at once, and so how many are preempted, depends on the machine
        kv_cache_bytes=2**16,
        async_scheduling=is_ahead,
        prompt_lookup=not is_ahead,
    )
    engine = LLMEngine(config)
    crowd = Crowd(engine, num_requests)
    while crowd.num_added < num_requests * 2 // 5:
        crowd.step()
    gc.collect()
    bytes_before, objects_before = resident_bytes(), len(gc.get_objects())
    while crowd.num_added < num_requests or crowd.running:
        crowd.step()
        if crowd.num_added % 1000 == 0:
            engine.check_integrity()
    assert not engine.has_unfinished()
    assert not engine._answers.requests
    assert engine.stats.kv_cache_usage == 0
    assert engine.stats.num_preemptions > num_requests // 200
    assert crowd.num_aborted > num_requests // 50
    assert (crowd.num_ahead > engine.stats.num_steps // 2) == is_ahead
    assert len(crowd.finished) > num_requests // 2
    engine.check_integrity()
    crowd.finished.clear()
    gc.collect()
    num_objects, num_bytes = len(gc.get_objects()) - objects_before, resident_bytes() - bytes_before
    # The allocator's own rest comes to 7 MB; a row of logits kept from each step of 10,000 requests would be several
    # times the bound.
    assert (num_objects < 1_000, num_bytes < 16 * 2**20) == (True, True), (num_objects, num_bytes)
