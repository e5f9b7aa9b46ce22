"""Two ranks for tests: the test's own process is rank 0, a process of a pool is rank 1."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from llm.parallel import ParallelConfig, ProcessGroup, connect, listen
from preprocess.torchvision_build import make_importable

T = TypeVar("T")
TIMEOUT_S = 20.0


def pool_for_rank_one() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=make_importable)


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


def silent_rank(rank: int, world_size: int) -> Any:
    """A group that can be asked for its size only."""
    return SimpleNamespace(rank=rank, world_size=world_size)
