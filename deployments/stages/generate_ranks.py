"""The ranks of one Generate replica: rank 0 runs in the replica, each other rank in an actor of its placement group.

Ray ends the actors with the replica. If an actor ends first, the replica fails its health check."""

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylens.deployments.config import GenerateConfig
from raylens.deployments.server_log import join_server_log
from raylens.deployments.stages.memory_turn import memory_turn
from raylens.deployments.stages.process_setup import end_startup, set_up_torch

if TYPE_CHECKING:
    from raylens.llm.config import EngineConfig
    from raylens.llm.engine import LLMEngine
    from raylens.llm.ranks.parallel import ParallelConfig, ProcessGroup

logger = logging.getLogger(f"ray.serve.{__name__}")

T = TypeVar("T")
_LOOPBACK = "127.0.0.1"
_LOAD_TIMEOUT_SECONDS = 1800.0  # between the fastest and the slowest rank
_REASON_SECONDS = 10.0  # a failed rank may report its reason this long after the other ranks notice the failure
_STOP_SECONDS = 2.0  # in which ranks stop by themselves before Ray kills them


class GenerateRank:
    """Actor class of a rank other than 0. `num_cpus`: its torch threads."""

    def __init__(self, num_cpus: float) -> None:
        join_server_log("generate rank")
        set_up_torch(num_cpus)

    def node_address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def load(self, config: "EngineConfig", parallel: "ParallelConfig", address: str, port: int) -> None:
        """Connects to the other ranks at rank 0's address and loads this rank's part of the model."""
        import torch

        from raylens.llm.model_runner import ModelRunner
        from raylens.llm.ranks.parallel import ProcessGroup, connect

        store = connect(parallel, address, port)
        self._group = ProcessGroup(parallel, store, torch.device(config.device))
        with memory_turn(config.device):
            self._runner = ModelRunner(config, self._group)
        end_startup()

    def run(self) -> None:
        """Takes part in every step until rank 0 sends stop."""
        from raylens.llm.ranks.lockstep import serve_steps

        serve_steps(self._runner.run_step, self._group)


class RankActors:
    """The ranks of a replica other than 0. The constructor starts their processes without waiting for them."""

    def __init__(self, settings: GenerateConfig) -> None:
        group = ray.util.get_current_placement_group()
        assert group is not None, "the deployment reserves a bundle for each rank"
        self._world_size = settings.tensor_parallel_size
        self._actors: dict[int, Any] = {}
        for rank in range(1, self._world_size):
            bundle = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
            actor = ray.remote(GenerateRank).options(
                num_cpus=settings.num_cpus, num_gpus=settings.num_gpus, scheduling_strategy=bundle
            )
            self._actors[rank] = actor.remote(settings.num_cpus)
        self._runs: list[Future[None]] = []
        self._is_stopping = False

    def load_engine(self, config: "EngineConfig") -> "LLMEngine":
        """Returns rank 0's engine once all ranks have loaded their parts in parallel. Raises RuntimeError."""
        from raylens.llm.ranks.parallel import listen

        places = self._places()
        store = listen(places[0])
        address = places[0].host
        others: dict[int, Future[Any]] = {
            rank: actor.load.remote(config, places[rank], address, store.port).future()
            for rank, actor in self._actors.items()
        }
        # On its own thread: loading waits for every rank, even for one that never connects.
        own = _in_thread(partial(_load_rank_0, config, places[0], store))
        _results({0: own, **others})
        self._group, engine = own.result()
        return engine

    def run(self, on_end: Callable[[Exception], None]) -> None:
        """Starts the other ranks' step loops. If a rank ends before `stop`, `on_end` runs on another thread."""
        for rank, actor in self._actors.items():
            run: Future[None] = actor.run.remote().future()
            self._runs.append(run)
            run.add_done_callback(partial(self._tell, rank, on_end))

    def stop(self) -> None:
        """Stops the other ranks gracefully. Call it after rank 0's last step."""
        from raylens.llm.ranks.lockstep import stop_ranks
        from raylens.llm.ranks.parallel import RankDiedError

        self._is_stopping = True
        if self._runs:
            with contextlib.suppress(RankDiedError):
                stop_ranks(self._group)
            wait(self._runs, timeout=_STOP_SECONDS)

    def _places(self) -> "list[ParallelConfig]":
        """Returns each rank's ParallelConfig, in rank order."""
        from raylens.llm.ranks.parallel import ParallelConfig

        addresses = {rank: actor.node_address.remote().future() for rank, actor in self._actors.items()}
        hosts = meeting_hosts([ray.util.get_node_ip_address(), *_results(addresses)])
        return [ParallelConfig(rank, self._world_size, host, _LOAD_TIMEOUT_SECONDS) for rank, host in enumerate(hosts)]

    def _tell(self, rank: int, on_end: Callable[[Exception], None], run: "Future[None]") -> None:
        if self._is_stopping:
            return
        error = run.exception()
        ended = RuntimeError(f"rank {rank} ended: {'it was told to stop' if error is None else _in_one_line(error)}")
        logger.error("%s", ended)
        on_end(ended)


def meeting_hosts(node_addresses: list[str]) -> list[str]:
    """Returns each rank's address for the others: loopback if all are on one node, else its node's address."""
    return [_LOOPBACK] * len(node_addresses) if len(set(node_addresses)) == 1 else node_addresses


def _load_rank_0(config: "EngineConfig", place: "ParallelConfig", store: Any) -> "tuple[ProcessGroup, LLMEngine]":
    import torch

    from raylens.llm.engine import LLMEngine
    from raylens.llm.ranks.parallel import ProcessGroup

    group = ProcessGroup(place, store, torch.device(config.device))
    return group, LLMEngine(config, group)


def _results(futures: dict[int, Future[T]]) -> list[T]:
    """Returns each rank's result. Raises RuntimeError at the first failure, without waiting for the other ranks."""
    from raylens.llm.ranks.parallel import RankDiedError

    done, pending = wait(futures.values(), return_when=FIRST_EXCEPTION)
    if all(isinstance(future.exception(), RankDiedError | None) for future in done):
        # Ranks that lost a peer report only the loss, often before the failed rank reports its reason.
        wait(pending, timeout=_REASON_SECONDS)
    errors = {rank: error for rank, future in futures.items() if future.done() and (error := future.exception())}
    if not errors:
        return [future.result() for future in futures.values()]
    rank, error = min(errors.items(), key=lambda item: isinstance(item[1], RankDiedError))
    raise RuntimeError(f"rank {rank} could not load: {_in_one_line(error)}") from error


def _in_one_line(error: BaseException) -> str:
    """Returns the type and the message's first line of an error, or of a Ray task error's cause."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


def _in_thread(function: Callable[[], T]) -> "Future[T]":
    """Runs the function on a daemon thread. An executor's thread would keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future
