"""Runs a synchronous engine on its own thread, for asyncio callers."""

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
from functools import partial
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(f"ray.serve.{__name__}")

_IDLE_BEAT_SECONDS = 0.5
_CLOSE_SECONDS = 5.0
SWITCH_SECONDS = 5e-5
"""The interpreter's switch interval. With Python's 5 ms, longer than a GPU step, the engine's thread waits while the
event loop sends the last step's outputs. Linux may add 50 us to any wait, so a shorter interval gains little."""


class EngineOutput(Protocol):
    @property
    def request_id(self) -> str: ...


OutputT = TypeVar("OutputT", bound=EngineOutput)
OutputCovT = TypeVar("OutputCovT", bound=EngineOutput, covariant=True)


class Engine(Protocol[OutputCovT]):
    """The interface of the encoder engine and the LLM engine."""

    def step(self) -> Sequence[OutputCovT]: ...
    def abort(self, request_id: str) -> None: ...

    @property
    def is_idle(self) -> bool: ...


class EngineDiedError(RuntimeError):
    """The engine's thread ended, so the replica must be replaced."""


class _EngineRequest(Generic[OutputT]):
    """`ended` resolves once `receive` has all outputs, or with the failure."""

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
    """Steps the engine while it has work. Create it and call `run` on the same event loop. After a step, one callback
    there delivers all outputs; a wake-up per request would cost more, while the engine's thread cannot run Python."""

    def __init__(
        self,
        engine: Engine[OutputT],
        *,
        name: str,
        step_timeout_s: float,
        initializer: Callable[[], None] = lambda: None,
    ) -> None:
        """`initializer` runs first on the engine's thread. Sets the process's switch interval to SWITCH_SECONDS."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._engine = engine
        self._step_timeout_s = step_timeout_s
        self._initializer = initializer
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[str, _EngineRequest[OutputT]] = {}
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
        """Runs one request until `receive` returns True, an error or a cancellation, then aborts it in the engine.

        `receive(outputs)` runs on the event loop in the caller's context and gets all ready outputs.
        `add_request(engine_id)` runs on the engine's thread; so does the result of each of `additions`, once its
        coroutine returns. `run` raises their errors. `engine_id` stays unique if a request is sent again while its
        first attempt ends."""
        if self._failure is not None:
            raise EngineDiedError("the engine has stopped") from self._failure
        request = _EngineRequest(receive)
        engine_id = f"{request_id}#{next(self._numbers)}"
        self._requests[engine_id] = request
        self._commands.put(partial(self._obey, engine_id, add_request))
        adding = [asyncio.create_task(self._add_later(engine_id, addition)) for addition in additions]
        try:
            await request.ended
        finally:
            for task in adding:
                task.cancel()
            if request.ended.done() and not request.ended.cancelled():
                request.ended.exception()  # a cancelled caller does not retrieve the exception
            del self._requests[engine_id]
            self._commands.put(lambda: self._engine.abort(engine_id))

    def check_health(self) -> None:
        """Raises EngineDiedError if the thread has ended or a step exceeds `step_timeout_s`."""
        if self._failure is not None:
            raise EngineDiedError("the engine has stopped") from self._failure
        if self.heartbeat_age > self._step_timeout_s:
            raise EngineDiedError(f"no step ended in {self.heartbeat_age:.0f} s")

    def wake(self) -> None:
        """Makes the thread check `is_idle` again. Thread-safe."""
        self._commands.put(lambda: None)

    def fail(self, error: Exception) -> None:
        """Ends every `run` and the thread, and fails the health check, as if a step had raised `error`. Thread-safe."""
        self._failure = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed when the replica shuts down
            self._loop.call_soon_threadsafe(self._fail_all)

    def close(self) -> bool:
        """Ends the thread after its current step, without further outputs. Returns False if the step takes too long."""
        self._is_closed = True
        self.wake()
        self._thread.join(_CLOSE_SECONDS)
        return not self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def heartbeat_age(self) -> float:
        """Returns the seconds since the engine's thread last finished a step or polled while idle."""
        return time.monotonic() - self._last_beat

    def _run(self) -> None:
        import torch  # the ingress imports this module and must not load torch

        try:
            self._initializer()
            with torch.inference_mode():  # once: entering it costs a tenth of a step's overhead
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
            self._commands.put(partial(self._obey, engine_id, await addition()))
        except Exception as error:
            self._fail(engine_id, error)

    def _obey(self, engine_id: str, command: Callable[[str], None]) -> None:
        try:
            command(engine_id)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, engine_id, error)

    def _deliver(self) -> None:
        """Gives each request its ready outputs, from several steps if the event loop has fallen behind."""
        ready: dict[str, list[OutputT]] = {}
        for _ in range(len(self._ready)):  # the engine's thread appends meanwhile
            for output in self._ready.popleft():
                ready.setdefault(output.request_id, []).append(output)
        for engine_id, outputs in ready.items():
            if engine_id in self._requests:
                self._requests[engine_id].give(outputs)

    def _fail(self, engine_id: str, error: Exception) -> None:
        if engine_id in self._requests:
            self._requests[engine_id].fail(error)

    def _fail_all(self) -> None:
        for request in self._requests.values():
            request.fail(EngineDiedError("the engine has stopped"))
