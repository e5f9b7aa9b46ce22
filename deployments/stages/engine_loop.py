"""Runs a synchronous engine on a thread of its own, for callers that use asyncio."""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(f"ray.serve.{__name__}")

_IDLE_BEAT_SECONDS = 0.5
_CLOSE_SECONDS = 5.0


class EngineOutput(Protocol):
    @property
    def request_id(self) -> str: ...


OutputT = TypeVar("OutputT", bound=EngineOutput)
OutputCovT = TypeVar("OutputCovT", bound=EngineOutput, covariant=True)


class Engine(Protocol[OutputCovT]):
    """What the encoder engine and the LLM engine have in common."""

    def step(self) -> Sequence[OutputCovT]: ...
    def abort(self, request_id: str) -> None: ...

    @property
    def is_idle(self) -> bool: ...


class EngineDiedError(RuntimeError):
    """The engine's thread ended; the replica has to be replaced."""


class EngineLoop(Generic[OutputT]):
    """Steps the engine while it has work. Create it and call `stream` on one event loop."""

    def __init__(
        self,
        engine: Engine[OutputT],
        *,
        name: str,
        step_timeout_s: float,
        initializer: Callable[[], None] = lambda: None,
    ) -> None:
        """`initializer`: is called first on the engine's thread."""
        self._engine = engine
        self._step_timeout_s = step_timeout_s
        self._initializer = initializer
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outputs: dict[str, asyncio.Queue[OutputT | Exception]] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._last_beat = time.monotonic()
        self._failure: Exception | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def stream(
        self,
        request_id: str,
        add_request: Callable[[str], None],
        additions: Sequence[Callable[[], Awaitable[Callable[[str], None]]]] = (),
    ) -> AsyncGenerator[list[OutputT]]:
        """Yields the request's outputs until the caller closes the stream: outputs that are ready together as a list.

        `add_request(engine_id)` runs on the engine's thread. So does the result of each of `additions`, as soon as it
        is known. The stream raises what any of them raises. The id is unique, even when a request is sent again while
        its first attempt is still ending. Closing the stream aborts the request.
        """
        if self._failure is not None:
            raise EngineDiedError("the engine has stopped") from self._failure
        outputs: asyncio.Queue[OutputT | Exception] = asyncio.Queue()
        engine_id = f"{request_id}#{next(self._numbers)}"
        self._outputs[engine_id] = outputs
        self._submit(engine_id, add_request)
        adding = [asyncio.create_task(self._add_later(engine_id, addition)) for addition in additions]
        try:
            while True:
                ready = [await outputs.get()]
                while not outputs.empty():
                    ready.append(outputs.get_nowait())
                for output in ready:
                    if isinstance(output, Exception):
                        raise output
                yield [output for output in ready if not isinstance(output, Exception)]
        finally:
            for task in adding:
                task.cancel()
            del self._outputs[engine_id]
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
        """Ends every stream and the thread and fails the health, as if a step had raised `error`. Thread-safe."""
        self._failure = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed when the replica shuts down
            self._loop.call_soon_threadsafe(self._fail_all)

    def close(self) -> bool:
        """Ends the thread after its current step. False: that takes too long. Streams get no more outputs."""
        self._is_closed = True
        self.wake()
        self._thread.join(_CLOSE_SECONDS)
        return not self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """The streams that are open."""
        return len(self._outputs)

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
                self._loop.call_soon_threadsafe(self._deliver, outputs)

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
            self._put(engine_id, error)

    def _submit(self, engine_id: str, command: Callable[[str], None]) -> None:
        self._commands.put(lambda: self._obey(engine_id, command))

    def _obey(self, engine_id: str, command: Callable[[str], None]) -> None:
        try:
            command(engine_id)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._put, engine_id, error)

    def _deliver(self, outputs: Sequence[OutputT]) -> None:
        for output in outputs:
            self._put(output.request_id, output)

    def _put(self, engine_id: str, output: OutputT | Exception) -> None:
        if engine_id in self._outputs:
            self._outputs[engine_id].put_nowait(output)

    def _fail_all(self) -> None:
        for outputs in self._outputs.values():
            outputs.put_nowait(EngineDiedError("the engine has stopped"))
