"""The group of processes that run one model together. Rank 0 leads, and all ranks take part in each collective.

An engine has a group of its own, not torch's global default group, so that one process can hold several engines."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # this module declares their types

T = TypeVar("T")

# A message up to this size costs one broadcast; a longer one sends its rest in a second.
FRAME_BYTES = 64 * 2**10
_LENGTH_BYTES = 8
# Time-out of the wait for the next step: practically unbounded, because the engine may be idle for long. If rank 0
# ends, its connection closes, and the wait fails.
_IDLE = timedelta(days=365)


class RankDiedError(RuntimeError):
    """A rank has died, timed out or is out of step. The group is unusable, and its processes should exit."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """This process's place among `world_size` ranks. `timeout_s`: the longest wait for another rank.

    `host`: the address of the interface between the ranks. Any process that reaches it could send messages to the
    ranks, so it is loopback unless the ranks run on several machines.

    Raises ValueError for a rank outside the world and for a timeout of 0 or less."""

    rank: int
    world_size: int
    host: str = "127.0.0.1"
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1 = {self.world_size - 1}, got {self.rank}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)


def listen(config: ParallelConfig) -> TCPStore:
    """Returns rank 0's store. It listens on a free port of `config.host`; the other ranks `connect` to its `.port`."""
    # Bound here, because the store itself would listen on every interface.
    listener = socket.create_server((config.host, 0))
    port: int = listener.getsockname()[1]
    return TCPStore(
        config.host,
        port,
        config.world_size,
        is_master=True,
        timeout=config.timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(config: ParallelConfig, address: str, port: int) -> TCPStore:
    """Returns another rank's connection to the store of rank 0. Raises RankDiedError if rank 0 does not answer in
    time."""
    return _collective(
        lambda: TCPStore(address, port, config.world_size, is_master=False, timeout=config.timeout), "connect"
    )


class ProcessGroup:
    """The collectives of the ranks at `store`. All ranks must call each collective, in the same order. A collective
    raises RankDiedError if another rank has died or exceeds the timeout."""

    def __init__(self, config: ParallelConfig, store: Store, device: torch.device) -> None:
        self.rank = config.rank
        self.world_size = config.world_size
        # Messages always stay on the CPU, so that a waiting rank does not keep its GPU busy.
        self._messages = _collective(lambda: _gloo(config, PrefixStore("messages", store)), "set-up")
        self._tensors: dist.ProcessGroup = self._messages
        if device.type == "cuda":
            self._tensors = _collective(lambda: _nccl(config, PrefixStore("tensors", store)), "set-up")
        self._idle = dist.BroadcastOptions()
        self._idle.timeout = _IDLE

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` over all ranks, in place, and returns it."""
        _collective(lambda: self._tensors.allreduce([tensor]).wait(), "all_reduce")
        return tensor

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensors of all ranks, of equal shape, stacked by rank: (world_size, *tensor.shape)."""
        gathered = tensor.new_empty(self.world_size * tensor.numel())
        # NCCL and gloo both fill one flat buffer without an extra copy.
        _collective(lambda: self._tensors._allgather_base(gathered, tensor.flatten()).wait(), "all_gather")
        return gathered.view(self.world_size, *tensor.shape)

    def send(self, message: torch.Tensor) -> None:
        """Broadcasts a message from rank 0 to the other ranks: uint8, (num_bytes,), possibly empty."""
        assert self.rank == 0
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        frame[:_LENGTH_BYTES].view(torch.int64)[0] = message.numel()
        head = message[: FRAME_BYTES - _LENGTH_BYTES]
        frame[_LENGTH_BYTES : _LENGTH_BYTES + head.numel()] = head
        self._broadcast(frame)
        self._broadcast(message[head.numel() :].contiguous())

    def receive(self) -> torch.Tensor:
        """Waits for rank 0's next message, practically without a timeout: uint8, (num_bytes,)."""
        assert self.rank != 0
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        self._broadcast(frame, self._idle)
        message = torch.empty(int(frame[:_LENGTH_BYTES].view(torch.int64)), dtype=torch.uint8)
        num_head = min(message.numel(), FRAME_BYTES - _LENGTH_BYTES)
        message[:num_head] = frame[_LENGTH_BYTES : _LENGTH_BYTES + num_head]
        self._broadcast(message[num_head:])
        return message

    def _broadcast(self, part: torch.Tensor, options: dist.BroadcastOptions | None = None) -> None:
        if part.numel():
            chosen = dist.BroadcastOptions() if options is None else options
            _collective(lambda: self._messages.broadcast([part], chosen).wait(), "broadcast")


def _gloo(config: ParallelConfig, store: Store) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = config.timeout
    # By default gloo resolves the machine's host name, possibly to an interface that other machines reach.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=config.host)]
    # A bare backend has the methods of a process group and needs no registration.
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, config.rank, config.world_size, options))


def _nccl(config: ParallelConfig, store: Store) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = config.timeout
    return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, config.rank, config.world_size, options))


def _collective(call: Callable[[], T], name: str) -> T:
    try:
        return call()
    except RuntimeError as error:
        raise RankDiedError(f"{name} with the other ranks failed: {error}") from error
