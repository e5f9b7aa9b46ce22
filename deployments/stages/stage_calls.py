"""Calls a stage, recovers from dead replicas and lost data, and translates Ray's errors to this application's."""

import asyncio
import collections
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

from ray.exceptions import ObjectLostError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from raylens.deployments.metrics.instruments import Counter
from raylens.deployments.stages.engine_loop import EngineDiedError
from raylens.deployments.stages.hand_over import EmbeddingsLostError, PromptLostError
from raylens.deployments.wire.piece_connection import PiecesLostError
from raylens.llm.lora.request import LoraError
from raylens.preprocess.schema import ChatTemplateError, InvalidRequestError
from raylens.preprocess.vision_plugins.interface import VisionPluginError

logger = logging.getLogger(f"ray.serve.{__name__}")

ResultT = TypeVar("ResultT")
# Serve raises RayServeException for a missing replica, a full queue, or the failure of a call that this one needs.
CALL_ERRORS = (RayError, RayServeException)
_LOSSES = (ObjectLostError, EmbeddingsLostError)
# The replica cannot continue, or could not start; another call can.
_ENDS = (EngineDiedError, PiecesLostError, PromptLostError)
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


class CallFailedError(Exception):
    """A call of `stage` failed. `error`: Ray's, or the stage's own."""

    def __init__(self, stage: str, error: Exception) -> None:
        super().__init__(f"{stage}: {error!r}")
        self.stage = stage
        self.error = error

    @property
    def is_loss(self) -> bool:
        """Whether input data is lost: the node or the replica with it is gone."""
        return isinstance(_cause(self.error), _LOSSES)

    def raise_translated(self) -> NoReturn:
        """Raises `error` as one of this application's."""
        translated = _translated(self.error, self.stage)
        if translated is self.error:  # unwrapped error: it must not become its own cause
            raise translated from None
        raise translated from self.error


@contextlib.contextmanager
def call_of(stage: str, errors: type[Exception] | tuple[type[Exception], ...] = CALL_ERRORS) -> Iterator[None]:
    """Raises `errors` of the block, which awaits a call of `stage`, as CallFailedError. By gRPC, a stage's own errors
    arrive unwrapped."""
    try:
        with _own_cancellation_only():
            yield
    except errors as error:
        raise CallFailedError(stage, error) from error


class StageCalls:
    """`items_recomputed` counts retries. `on_reply(stage)` runs whenever a stage answers, as a sign of life."""

    def __init__(self, items_recomputed: Counter, on_reply: Callable[[str], None] = lambda stage: None) -> None:
        self._items_recomputed = items_recomputed
        self.on_reply = on_reply

    async def send(self, stage: str, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Awaits `call()` and retries it if that can help. See `recover`."""
        attempts = collections.Counter[str]()
        while True:
            try:
                with call_of(stage):
                    result = await call()
            except CallFailedError as failed:
                await self.recover(failed, attempts)
            else:
                self.on_reply(stage)
                return result

    async def recover(
        self, failed: CallFailedError, attempts: "collections.Counter[str]", make_lost_again: Remedy | None = None
    ) -> None:
        """Returns if the call can be made again, else raises InvalidRequestError or a StageError. `attempts`: the
        number of failed calls so far, by stage.

        After a replica's death, another takes the call after a pause. `make_lost_again` recomputes lost input data;
        without it, a call with lost data fails. A stage's own error is final."""
        stage, cause = failed.stage, _cause(failed.error)
        has_died = not _is_own(failed.error) or isinstance(cause, _ENDS)
        can_help = make_lost_again is not None if failed.is_loss else has_died
        attempts[stage] += 1
        if not can_help or attempts[stage] == MAX_ATTEMPTS:
            failed.raise_translated()
        name = type(cause).__name__
        logger.warning("%s lost a request (%s), sending it again", stage, name)
        self._items_recomputed.inc(stage=stage, reason=name)
        if failed.is_loss and make_lost_again is not None:
            await make_lost_again()
        else:
            await asyncio.sleep(0.1 * 2 ** attempts[stage])


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


def _is_own(error: Exception) -> bool:
    """Returns whether the stage's code raised the error, rather than Ray."""
    return isinstance(error, RayTaskError) or not isinstance(error, CALL_ERRORS)


def _cause(error: BaseException) -> BaseException:
    """Returns the exception inside Ray's wrapping: the stage's own, or that of a call whose result this call needs."""
    cause: BaseException | None = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(error, RayServeException):
        cause = error.__cause__
    return cause or error


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
