"""Two ranks for tests: the test's own process is rank 0, a process of a pool is rank 1."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.model_runner import ModelRunner
from raylens.llm.ranks.lockstep import serve_steps
from raylens.llm.ranks.parallel import ParallelConfig, ProcessGroup, connect, listen
from raylens.modeling.torchvision_build import make_importable

T = TypeVar("T")
TIMEOUT_S = 20.0


def pool_for_rank_one() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=make_importable)


class PoolOfRankOne:
    """A pool for several tests, made anew after one that failed and left none."""

    def __init__(self) -> None:
        self._pool = pool_for_rank_one()

    def usable(self) -> ProcessPoolExecutor:
        if self._pool._broken:
            self._pool = pool_for_rank_one()
        return self._pool

    def shutdown(self) -> None:
        self._pool.shutdown()


def on_both(pool: ProcessPoolExecutor, function: Callable[..., T], *args: Any) -> tuple[T, T]:
    """`function(group, *args)` of rank 0 and of rank 1."""
    config = ParallelConfig(0, 2, timeout_s=TIMEOUT_S)
    store = listen(config)
    other = pool.submit(as_rank, ParallelConfig(1, 2, timeout_s=TIMEOUT_S), store.port, function, *args)
    group = ProcessGroup(config, store, torch.device("cpu"))
    return function(group, *args), other.result(timeout=2 * TIMEOUT_S)


def as_rank(config: ParallelConfig, port: int, function: Callable[..., T], *args: Any) -> T:
    torch.set_num_threads(1)
    store = connect(config, "127.0.0.1", port)
    return function(ProcessGroup(config, store, torch.device("cpu")), *args)


def serve_engine(group: ProcessGroup, config: EngineConfig) -> None:
    """What a rank other than 0 does."""
    serve_steps(ModelRunner(config, group).run_step, group)


@contextmanager
def engine_of_two(
    pool: ProcessPoolExecutor, engine_config: EngineConfig, *, timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[LLMEngine, ProcessGroup, "Future[None]"]]:
    """The engine of rank 0 and what becomes of rank 1, which does not outlive a test that fails."""
    config = ParallelConfig(0, 2, timeout_s=timeout_s)
    store = listen(config)
    rank_one = ParallelConfig(1, 2, timeout_s=timeout_s)
    other = pool.submit(as_rank, rank_one, store.port, serve_engine, engine_config)
    group = ProcessGroup(config, store, torch.device("cpu"))
    try:
        yield LLMEngine(engine_config, group), group, other
    except BaseException:
        for process in pool._processes.values():
            process.kill()
        raise


def silent_rank(rank: int, world_size: int) -> Any:
    """A group that can be asked for its size only."""
    return SimpleNamespace(rank=rank, world_size=world_size)
