"""Runs a synchronous engine on a thread of its own, for callers that use asyncio."""

import asyncio
import contextlib
import itertools
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(f"ray.serve.{__name__}")

_IDLE_BEAT_SECONDS = 0.5
_CLOSE_SECONDS = 5.0
SWITCH_SECONDS = 5e-5
"""After how long a thread of this process that runs Python gives way to one that waits to. Python's own 5 ms are longer
than a step on a GPU: the engine's thread lets go of the interpreter at each operation of torch, and may then wait until
the event loop has sent all that the last step gave. Linux may add 50 us to any wait, so that a shorter interval gains
little."""


class EngineOutput(Protocol):
    @property
    def request_id(self) -> str: ...


OutputT = TypeVar("OutputT", bound=EngineOutput)
OutputCovT = TypeVar("OutputCovT", bound=EngineOutput, covariant=True)


class Engine(Protocol[OutputCovT]):
    """The interface that the encoder engine and the LLM engine share."""

    def step(self) -> Sequence[OutputCovT]: ...
    def abort(self, request_id: str) -> None: ...

    @property
    def is_idle(self) -> bool: ...


class EngineDiedError(RuntimeError):
    """The engine's thread ended; the replica has to be replaced."""


class _Call(Generic[OutputT]):
    """A request in the engine. `ended` has the failure, if there is one."""

    def __init__(self, receive: Callable[[list[OutputT]], bool]) -> None:
        self._receive = receive
        self._context = copy_context()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def give(self, outputs: list[OutputT]) -> None:
        if self.ended.done():
            return
        try:
            if self._context.run(self._receive, outputs):
                self.ended.set_result(None)
        except Exception as error:
            self.ended.set_exception(error)

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


class EngineLoop(Generic[OutputT]):
    """Steps the engine while it has work. Create it and call `run` on one event loop.

    After a step, one callback of the event loop gives all requests their outputs. No task has to wake for each of them,
    since the engine's thread gets no Python done while the event loop works.
    """

    def __init__(
        self,
        engine: Engine[OutputT],
        *,
        name: str,
        step_timeout_s: float,
        initializer: Callable[[], None] = lambda: None,
    ) -> None:
        """`initializer`: is called first on the engine's thread. The process has a switch interval of SWITCH_SECONDS
        from now on."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._engine = engine
        self._step_timeout_s = step_timeout_s
        self._initializer = initializer
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: dict[str, _Call[OutputT]] = {}
        self._ready: deque[Sequence[OutputT]] = deque()
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._last_beat = time.monotonic()
        self._failure: Exception | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(
        self,
        request_id: str,
        add_request: Callable[[str], None],
        receive: Callable[[list[OutputT]], bool],
        additions: Sequence[Callable[[], Awaitable[Callable[[str], None]]]] = (),
    ) -> None:
        """Has the engine work on a request until `receive` returns that it has got all.

        `receive(outputs)` is called on the event loop, in the caller's context: outputs that are ready together come
        together. `add_request(engine_id)` runs on the engine's thread. So does the result of each of `additions`, as
        soon as it is known. `run` raises what any of them raises. The id is unique, even when a request is sent again
        while its first attempt is still ending. The request is aborted however `run` ends.
        """
        if self._failure is not None:
            raise EngineDiedError("the engine has stopped") from self._failure
        call = _Call(receive)
        engine_id = f"{request_id}#{next(self._numbers)}"
        self._calls[engine_id] = call
        self._submit(engine_id, add_request)
        adding = [asyncio.create_task(self._add_later(engine_id, addition)) for addition in additions]
        try:
            await call.ended
        finally:
            for task in adding:
                task.cancel()
            if call.ended.done() and not call.ended.cancelled():
                call.ended.exception()  # a caller that is cancelled now does not ask for it
            del self._calls[engine_id]
            self._commands.put(lambda: self._engine.abort(engine_id))

    def check_health(self) -> None:
        """Raises EngineDiedError when the thread has ended or one step takes longer than `step_timeout_s`."""
        if self._failure is not None:
            raise EngineDiedError("the engine has stopped") from self._failure
        if self.heartbeat_age > self._step_timeout_s:
            raise EngineDiedError(f"no step ended in {self.heartbeat_age:.0f} s")

    def wake(self) -> None:
        """Has the thread ask the engine again whether it is idle. Thread-safe."""
        self._commands.put(lambda: None)

    def fail(self, error: Exception) -> None:
        """Ends every `run` and the thread, and fails the health, as if a step had raised `error`. Thread-safe."""
        self._failure = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed when the replica shuts down
            self._loop.call_soon_threadsafe(self._fail_all)

    def close(self) -> bool:
        """Ends the thread after its current step. False: that takes too long. Requests get no more outputs."""
        self._is_closed = True
        self.wake()
        self._thread.join(_CLOSE_SECONDS)
        return not self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """The requests that `run` has not ended."""
        return len(self._calls)

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine's thread last showed life, between two steps or while idle."""
        return time.monotonic() - self._last_beat

    def _run(self) -> None:
        import torch  # the ingress, which does without, imports this module

        try:
            self._initializer()
            with torch.inference_mode():  # once: to enter it takes a tenth of what a step takes beside the model
                self._step_until_closed()
        except Exception as error:
            logger.exception("engine thread ended")
            self.fail(error)

    def _step_until_closed(self) -> None:
        while self._failure is None and not self._is_closed:
            self._last_beat = time.monotonic()
            self._obey_commands(wait=self._engine.is_idle)
            outputs = [] if self._engine.is_idle else self._engine.step()
            if outputs:
                self._ready.append(outputs)
                self._loop.call_soon_threadsafe(self._deliver)

    def _obey_commands(self, *, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            if wait:
                self._commands.get(timeout=_IDLE_BEAT_SECONDS)()
            while True:
                self._commands.get_nowait()()

    async def _add_later(self, engine_id: str, addition: Callable[[], Awaitable[Callable[[str], None]]]) -> None:
        try:
            self._submit(engine_id, await addition())
        except Exception as error:
            self._fail(engine_id, error)

    def _submit(self, engine_id: str, command: Callable[[str], None]) -> None:
        self._commands.put(lambda: self._obey(engine_id, command))

    def _obey(self, engine_id: str, command: Callable[[str], None]) -> None:
        try:
            command(engine_id)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, engine_id, error)

    def _deliver(self) -> None:
        """Gives each request what is ready of it: of several steps, where the event loop has fallen behind."""
        ready: dict[str, list[OutputT]] = {}
        for _ in range(len(self._ready)):  # the engine goes on meanwhile
            for output in self._ready.popleft():
                ready.setdefault(output.request_id, []).append(output)
        for engine_id, outputs in ready.items():
            if engine_id in self._calls:
                self._calls[engine_id].give(outputs)

    def _fail(self, engine_id: str, error: Exception) -> None:
        if engine_id in self._calls:
            self._calls[engine_id].fail(error)

    def _fail_all(self) -> None:
        for call in self._calls.values():
            call.fail(EngineDiedError("the engine has stopped"))
