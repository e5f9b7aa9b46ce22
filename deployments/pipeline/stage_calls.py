"""One call of a stage: sent again where that is safe, its failure in terms of this application.

Ray reports a replica's death, a lost object and an error of the stage's own code in ways of its own; nothing above
this module sees them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from ray import ObjectRef
from ray.exceptions import ObjectLostError, ObjectRefStreamEndOfStreamError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentResponseGenerator

from deployments.metrics import IngressMetrics
from deployments.stages.engine_loop import EngineDiedError
from deployments.stages.hand_over import EmbeddingsLostError
from preprocess.schema import InvalidRequestError

logger = logging.getLogger(f"ray.serve.{__name__}")

ResultT = TypeVar("ResultT")
# What a failed call raises. The second is no RayError: no replica, a full queue, a call that this one needed failed.
CALL_ERRORS = (RayError, RayServeException)
_MAX_ATTEMPTS = 4


class StageError(RuntimeError):
    """What the server, not the client, did wrong, and in which stage."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class StageFailedError(StageError):
    """A stage answered with an error of its own; it would do so again."""


class StageUnavailableError(StageError):
    """A stage has no replica, or they died faster than the request could be sent again."""


class ItemLostError(StageError):
    """The object behind a reference is gone, with the node that held it."""


class StageCalls:
    """Calls of all stages. `on_reply(stage)` is told whenever one has answered, which is a sign of life."""

    def __init__(self, metrics: IngressMetrics, on_reply: Callable[[str], None]) -> None:
        self._metrics = metrics
        self.on_reply = on_reply

    async def send(self, stage: str, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Awaits `call()`, again if the replica died. Raises InvalidRequestError or a StageError."""
        attempt = 0
        while True:
            try:
                with own_cancellation_only():
                    result = await call()
            except CALL_ERRORS as error:
                await self.retry_or_raise(error, stage, attempt)
                attempt += 1
            else:
                self.on_reply(stage)
                return result

    async def retry_or_raise(self, error: Exception, stage: str, attempt: int) -> None:
        """Returns, after a pause, when sending the call again can help; else raises `error` as one of ours.

        A stage that answered with an error will answer so again; one that died will not.
        """
        cause = _cause(error)
        has_died = not isinstance(error, RayTaskError) or isinstance(cause, EngineDiedError)
        if not has_died or isinstance(cause, ObjectLostError) or attempt == _MAX_ATTEMPTS - 1:
            raise translated(error, stage) from error
        self.note_again(stage, cause)
        await asyncio.sleep(0.2 * 2**attempt)

    def note_again(self, stage: str, reason: BaseException) -> None:
        """Counts a call that is made once more because of `reason`."""
        name = type(reason).__name__
        logger.warning("%s lost a request (%s), sending it again", stage, name)
        self._metrics.items_recomputed.inc(tags={"stage": stage, "reason": name})


async def tensors_and_info(
    response: DeploymentResponseGenerator[Any], on_pending: Callable[[ObjectRef], None] = lambda ref: None
) -> tuple[ObjectRef, Any]:
    """A reference to a stage's first object, which stays in the object store, and the value of its second.

    `on_pending` gets the reference as soon as a replica has taken the call. Whoever waits for what is behind it gets
    the stage's error if it ends before.
    """
    try:
        refs = await response._to_object_ref_gen()
        tensors, info = refs._get_next_ref_n(2)  # neither has to be there yet
        on_pending(tensors)
        try:
            value = await info
        except ObjectRefStreamEndOfStreamError:
            await tensors  # raises: the stage's error is the last of its objects
            raise
        refs._consume_next_ref_n(2)
        return tensors, value
    except asyncio.CancelledError:
        cancel(response)
        raise


@contextlib.contextmanager
def own_cancellation_only() -> Iterator[None]:
    """For the wait for a call. Ray Serve raises CancelledError, too, of a call that ended because its replica did: in
    a task that nobody has cancelled this is a TaskCancelledError, one of CALL_ERRORS."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TaskCancelledError from None


def cancel(response: DeploymentResponseGenerator[Any]) -> None:
    """Ends a call whose answer nobody waits for any more."""
    # Cancelling a call that never reached a replica raises what kept it from there.
    with contextlib.suppress(Exception):
        response.cancel()


def _cause(error: BaseException) -> BaseException:
    """What lies under Ray's wrapping: the exception of the stage's own code, or of a call that this one needed."""
    cause: BaseException | None = None
    if isinstance(error, RayTaskError):
        cause = error.cause
    elif isinstance(error, RayServeException):
        cause = error.__cause__
    return error if cause is None else cause


def translated(error: Exception, stage: str) -> Exception:
    """Ray's error as one of ours."""
    cause = _cause(error)
    if isinstance(cause, InvalidRequestError):
        return cause
    if isinstance(cause, ObjectLostError | EmbeddingsLostError):
        return ItemLostError(stage, f"an item for the {stage} stage is lost")
    if isinstance(error, RayTaskError) and not isinstance(cause, EngineDiedError):
        return StageFailedError(stage, f"the {stage} stage failed")
    return StageUnavailableError(stage, f"the {stage} stage is not available")
