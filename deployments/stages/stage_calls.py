"""Calls a stage, recovers from dead replicas and lost data, and translates Ray's errors to this application's."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from ray.exceptions import ObjectLostError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from raylens.deployments.metrics.instruments import Counter
from raylens.deployments.ray_internals.handles import cancel_call
from raylens.deployments.stages.engine_loop import EngineDiedError
from raylens.deployments.stages.hand_over import EmbeddingsLostError
from raylens.deployments.wire.piece_connection import PiecesLostError
from raylens.llm.lora.request import LoraError
from raylens.preprocess.schema import ChatTemplateError, InvalidRequestError
from raylens.preprocess.vision_plugins.interface import VisionPluginError

logger = logging.getLogger(f"ray.serve.{__name__}")

ResultT = TypeVar("ResultT")
InputT = TypeVar("InputT")
# Serve raises RayServeException for a missing replica, a full queue, or the failure of a call that this one needs.
_CALL_ERRORS = (RayError, RayServeException)
_LOSSES = (ObjectLostError, EmbeddingsLostError)  # the node or the replica with the data is gone
_ENDS = (EngineDiedError, PiecesLostError)  # the replica cannot continue; another one can take its calls
MAX_ATTEMPTS = 4

Remedy = Callable[[], Awaitable[None]]


class StageHandles(NamedTuple):
    """One model's stages. `encoders`: by name (`encode`, `generate`, or both); of equals the first is used. While the
    application is built, deployments stand in for their handles."""

    preprocess: DeploymentHandle[Any]
    generate: DeploymentHandle[Any]
    encoders: Mapping[str, DeploymentHandle[Any]]

    def all(self) -> list[DeploymentHandle[Any]]:
        return [self.preprocess, self.generate, *self.encoders.values()]


class Stream(Protocol):
    """The streamed results of one call."""

    def __aiter__(self) -> AsyncGenerator[Any]: ...
    def cancel(self) -> None: ...


class StageError(RuntimeError):
    """A failure of the server, not a client's mistake, in `stage`."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class StageFailedError(StageError):
    """A stage answered with an error of its own; a retry would fail in the same way."""


class PlugInFailedError(StageFailedError):
    """A vision plug-in failed. Clients see the message."""


class AdapterFailedError(StageFailedError):
    """A LoRA adapter cannot be served. Clients see the message."""


class ChatTemplateFailedError(StageFailedError):
    """The model's chat template failed. Clients see the message."""


_SHOWN = {
    VisionPluginError: PlugInFailedError,
    LoraError: AdapterFailedError,
    ChatTemplateError: ChatTemplateFailedError,
}


class StageUnavailableError(StageError):
    """A stage has no replica, or replicas and data were lost in every attempt."""


class StageCalls:
    """`items_recomputed` counts retries. `on_reply(stage)` runs whenever a stage answers, as a sign of life."""

    def __init__(self, items_recomputed: Counter, on_reply: Callable[[str], None] = lambda stage: None) -> None:
        self._items_recomputed = items_recomputed
        self._on_reply = on_reply

    async def send(
        self, stage: str, call: Callable[[], Awaitable[ResultT]], make_lost_again: Remedy | None = None
    ) -> ResultT:
        """Awaits `call()` and retries it if that can help. `make_lost_again` recomputes the call's input data; without
        it, a call with lost data fails. Raises InvalidRequestError or a StageError."""
        attempt = 0
        while True:
            try:
                with _own_cancellation_only():
                    result = await call()
            except _CALL_ERRORS as error:
                await self._recover(error, stage, attempt, make_lost_again)
                attempt += 1
            else:
                self._on_reply(stage)
                return result

    async def stream(self, stage: str, call: Callable[[], Stream], make_lost_again: Remedy) -> AsyncGenerator[Any]:
        """Yields the stream of `call()`. Recovers like `send` until its first object. Closing it cancels the call."""
        attempt = 0
        while True:
            has_started = False
            response = call()
            try:
                with _own_cancellation_only():
                    async with aclosing(aiter(response)) as objects:
                        async for one in objects:
                            self._on_reply(stage)
                            has_started = True
                            yield one
                return
            except Exception as error:  # over gRPC, the stage's own errors arrive unwrapped
                if has_started:
                    _raise_translated(error, stage)
                await self._recover(error, stage, attempt, make_lost_again)
                attempt += 1
            except BaseException:
                _cancel(response)
                raise

    async def _recover(self, error: Exception, stage: str, attempt: int, make_lost_again: Remedy | None) -> None:
        """Returns if the call can be retried, else raises `error` as one of this application's. After a replica's
        death, another takes the call after a pause. Lost data is recomputed first. A stage's own error is final."""
        cause = _cause(error)
        is_lost = isinstance(cause, _LOSSES)
        has_died = not _is_own(error) or isinstance(cause, _ENDS)
        can_help = make_lost_again is not None if is_lost else has_died
        if not can_help or attempt == MAX_ATTEMPTS - 1:
            _raise_translated(error, stage)
        name = type(cause).__name__
        logger.warning("%s lost a request (%s), sending it again", stage, name)
        self._items_recomputed.inc(stage=stage, reason=name)
        if is_lost and make_lost_again is not None:
            await make_lost_again()
        else:
            await asyncio.sleep(0.2 * 2**attempt)


async def with_pending(
    inputs: Callable[[], Awaitable[InputT]],
    finished: Callable[[], Awaitable[Any]],
    call: Callable[[InputT], Awaitable[ResultT]],
) -> ResultT:
    """Returns the result of `call(await inputs())`, whose inputs may be references to pending data. Repeats the call if
    inputs were recomputed meanwhile, after a replica's death. `finished` waits until all inputs are computed; its error
    takes precedence over the call's error, which may only be a consequence."""
    while True:
        given = await inputs()
        work = asyncio.ensure_future(call(given))
        making = asyncio.ensure_future(finished())
        try:
            await asyncio.wait([work, making], return_when=asyncio.FIRST_COMPLETED)
            if not has_result(work):
                await making
                if await inputs() != given:
                    continue
            return await work
        finally:
            for task in (work, making):
                task.cancel()
            await asyncio.gather(work, making, return_exceptions=True)


def has_result(task: "asyncio.Future[Any]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


@contextlib.contextmanager
def _own_cancellation_only() -> Iterator[None]:
    """Raises TaskCancelledError, a _CALL_ERROR, if this task was not cancelled: the call's replica has died."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TaskCancelledError from None


def _cancel(response: DeploymentResponseGenerator[Any] | Stream) -> None:
    # Cancelling a call that never reached a replica raises the reason.
    with contextlib.suppress(Exception):
        if isinstance(response, DeploymentResponseGenerator):
            cancel_call(response)
        else:
            response.cancel()


def _is_own(error: Exception) -> bool:
    """Returns whether the stage's code raised the error, rather than Ray."""
    return isinstance(error, RayTaskError) or not isinstance(error, _CALL_ERRORS)


def _cause(error: BaseException) -> BaseException:
    """Returns the exception inside Ray's wrapping: the stage's own, or that of a call whose result this call needs."""
    cause: BaseException | None = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(error, RayServeException):
        cause = error.__cause__
    return cause or error


def _raise_translated(error: Exception, stage: str) -> NoReturn:
    translated = _translated(error, stage)
    if translated is error:  # unwrapped error: it must not become its own cause
        raise error
    raise translated from error


def _translated(error: Exception, stage: str) -> Exception:
    cause = _cause(error)
    if isinstance(cause, InvalidRequestError):
        return cause
    if isinstance(cause, _LOSSES):
        return StageUnavailableError(stage, f"an item for the {stage} stage is lost")
    for kind, shown in _SHOWN.items():
        if isinstance(cause, kind):
            return shown(stage, str(cause))
    if _is_own(error) and not isinstance(cause, _ENDS):
        return StageFailedError(stage, f"the {stage} stage failed")
    return StageUnavailableError(stage, f"the {stage} stage is not available")
