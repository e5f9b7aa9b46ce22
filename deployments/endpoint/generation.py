"""A client's request on its way through admission and the pipeline to its answer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from raylens.deployments.api.generation import AnyGenerationFields, GenerationFields
from raylens.deployments.api.prompt_fields import PromptAndMedia, PromptFields
from raylens.deployments.api.wire import ErrorResponse
from raylens.deployments.config import MetricsConfig
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.admission import OverloadedError
from raylens.deployments.endpoint.call import ApiCall
from raylens.deployments.endpoint.deadline import Deadline, DeadlineError
from raylens.deployments.endpoint.errors import error_response
from raylens.deployments.endpoint.request_cost import cost_of
from raylens.deployments.endpoint.served_models import ModelRoute, ServedModels
from raylens.deployments.metrics.definitions import IngressMetrics
from raylens.deployments.pipeline.merged_answers import Answers, MergedAnswers
from raylens.deployments.pipeline.piece_receiver import joined
from raylens.deployments.server_log import process_name
from raylens.deployments.stages.stage_calls import MAX_ATTEMPTS, StageUnavailableError
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import InvalidRequestError, Stopwatch

logger = logging.getLogger(f"ray.serve.{__name__}")


class WholeAnswer(Protocol):
    """Forms an answer of an API from the pieces of the stages."""

    def add(self, pieces: Sequence[GeneratedText]) -> None: ...

    def whole(self) -> BaseModel:
        """Returns the answer of all pieces."""
        ...


class Answer(WholeAnswer, Protocol):
    """An answer that also comes as server-sent events."""

    @property
    def last_event(self) -> str: ...

    def first_events(self) -> str: ...
    def events(self, pieces: Sequence[GeneratedText]) -> str: ...
    def last_events(self) -> str: ...
    def error_event(self, error: ErrorResponse) -> str: ...


Keep = Callable[[Answer], Awaitable[None]]
"""What happens with an answer that is whole, before its client has all of it."""

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second: for nginx


class EventStream(StreamingResponse):
    """Ray Serve cancels the request of a client that leaves. Starlette would listen for that in a task of its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


AnswerT = TypeVar("AnswerT", bound=WholeAnswer)


@dataclass(frozen=True, slots=True)
class Generations:
    """Begins the requests of all routes that send prompts to a model."""

    models: ServedModels
    metrics: IngressMetrics
    goals: MetricsConfig
    first_token_timeout_s: float

    @asynccontextmanager
    async def begin(self, body: PromptFields, call: ApiCall, prefix: str) -> "AsyncIterator[Generation]":
        """Yields a client's request. `prefix`: of its id."""
        request_id = f"{prefix}{body.request_id or call.request_id}"
        account = RequestAccount(self.metrics, request_id, call.caller, self.goals)
        async with _noting_end(body, account):
            call.check_fields(body)
            model = self.models.of(body.model)
            account.model = body.model or model.name
            deadline = Deadline(call.arrived_at, call.timeout_s if body.timeout_s is None else body.timeout_s)
            yield Generation(model, call, body, account, deadline, self.metrics, self.first_token_timeout_s)


@dataclass(frozen=True, slots=True)
class Generation:
    """One request of a client, on its way through admission and the pipeline to its answer."""

    model: ModelRoute
    call: ApiCall
    body: PromptFields
    account: RequestAccount
    deadline: Deadline
    metrics: IngressMetrics
    first_token_timeout_s: float

    async def enter(self, params: SamplingParams, prompts: Sequence[PromptAndMedia], *, pools: bool = False) -> None:
        """Waits until there is room for the request. `pools`: see `PipelineRequest`. Raises OverloadedError or
        InvalidRequestError."""
        await self._take_prompts(params, prompts, pools=pools)
        await self._wait_for_room()

    async def enter_in_turn(self, params: SamplingParams, prompts: Sequence[PromptAndMedia]) -> None:
        """The same for a request that nobody waits for: it tries again as long as the queue is full."""
        await self._take_prompts(params, prompts)
        while True:
            try:
                return await self._wait_for_room()
            except OverloadedError as error:
                await self.deadline.wait_for(asyncio.sleep(error.retry_after_s))

    async def _take_prompts(
        self, params: SamplingParams, prompts: Sequence[PromptAndMedia], *, pools: bool = False
    ) -> None:
        account, body, model = self.account, self.body, self.model
        options: dict[str, Any] = {
            "priority": self._priority,
            "cache_key": body.prompt_cache_key or body.session_id,
            "prompt_salt": body.cache_salt or "",
            "adapter": model.adapter_of(body.model),
            "returns_prompt_ids": isinstance(body, GenerationFields) and body.return_token_ids,
            "pools": pools,
        }
        model.ready_processor()  # raises before the wait
        if not pools:
            model.check_generates()
        opened = await self.deadline.wait_for(model.opened(self.call, prompts))
        account.requests = [
            model.request(self.call, self._request_id(number), body, params, one, **options)
            for number, one in enumerate(opened)
        ]
        account.num_answers = params.n
        self.call.traced.account = account

    async def _wait_for_room(self) -> None:
        cost = cost_of(self.account.requests, self.model.max_model_len, at_once=self._most_at_once)
        watch = Stopwatch()
        try:
            await self.deadline.wait_for(self.call.ticket.enter(cost, self._priority))
        finally:
            self.account.times.append(watch.read("admission_queue", process_name()))

    @property
    def _priority(self) -> int:
        return self.body.priority + self.call.caller.priority

    @property
    def _most_at_once(self) -> int:
        """The most prompts of the request in work together."""
        return min(self.body.most_at_once, self.call.caller.max_requests or self.body.most_at_once)

    def _request_id(self, number: int) -> str:
        return self.account.request_id + (f"-{number}" if self.body.most_at_once > 1 else "")

    async def respond(self, make_answer: Callable[[], Answer], keep: Keep | None = None) -> Response:
        assert isinstance(self.body, AnyGenerationFields)
        if not self.body.stream:
            completion = await self.complete(make_answer, keep)
            self.account.finish()
            return Response(completion.model_dump_json(), media_type="application/json")
        async with AsyncExitStack() as stack:
            answers = await self._begin(stack)
            events = self._events(make_answer(), answers, stack.pop_all(), keep, self.body.stream_interval)
            return EventStream(events, media_type="text/event-stream", headers=_STREAM_HEADERS)

    async def _begin(self, stack: AsyncExitStack) -> "_CountedAnswers":
        """Returns the answers once the first piece has come: an earlier failure is an HTTP error. `stack` closes
        them."""
        account, model = self.account, self.model
        stack.callback(account.observe_gaps)
        processor = model.ready_processor()
        parts = [model.pipeline.request(request, processor) for request in account.requests]
        merge = partial(MergedAnswers, num_answers=account.num_answers, at_once=self._most_at_once)
        answers = parts[0] if len(parts) == 1 else merge(parts)
        stack.push_async_callback(answers.aclose)
        counted = _CountedAnswers(answers, account, self.deadline)
        stages = {stage for request in account.requests for stage in request.stages}
        timeout_s = None if self.call.caller.is_batch else self.first_token_timeout_s  # live requests come before it
        async with model.monitor.while_there(stages):
            await counted.wait_for_first(timeout_s)
        return counted

    async def complete(
        self, make_answer: Callable[[], AnswerT], keep: Callable[[AnswerT], Awaitable[None]] | None = None
    ) -> BaseModel:
        """Returns the whole answer. Nobody has seen any of it before, so it is retried elsewhere if a replica dies."""
        for attempt in range(MAX_ATTEMPTS):
            async with AsyncExitStack() as stack:
                answers, answer = await self._begin(stack), make_answer()
                try:
                    while pieces := await answers.next():
                        answer.add(pieces)
                    completion = answer.whole()
                    if keep is not None:
                        await keep(answer)
                    return completion
                except StageUnavailableError as error:
                    if attempt == MAX_ATTEMPTS - 1:
                        raise
                    logger.warning("request %s: %s, making its answer again", self.account.request_id, error)
                    self.metrics.items_recomputed.inc(stage=error.stage, reason="AnswerLost")
            self.account.begin_again()
        raise AssertionError("the last attempt returns or raises")

    async def _events(
        self, answer: Answer, answers: "_CountedAnswers", stack: AsyncExitStack, keep: Keep | None, interval: int
    ) -> AsyncIterator[str]:
        """Yields server-sent events, each of `interval` tokens or more. An error becomes an event and ends the stream.
        `stack` closes `answers`."""
        async with stack:
            try:
                async with _noting_end(self.body, self.account):
                    if events := answer.first_events():
                        yield events
                    while pieces := await answers.next_run(interval):
                        if events := answer.events(pieces):
                            yield events
                    events = answer.last_events()
                    if keep is not None:
                        await keep(answer)
                    if events:
                        yield events
                    self.account.finish()
            except Exception as error:
                self.call.fail(error)
                yield answer.error_event(error_response(error)[1])
            yield answer.last_event


@dataclass(slots=True)
class _CountedAnswers:
    """A client's answers, whose pieces are counted as they come. `next` also returns the pieces of `wait_for_first`.
    Raises DeadlineError at the client's deadline."""

    answers: Answers
    account: RequestAccount
    deadline: Deadline
    first: Sequence[GeneratedText] = ()

    async def wait_for_first(self, timeout_s: float | None) -> None:
        """Raises StageUnavailableError after `timeout_s` without a piece."""
        try:
            async with asyncio.timeout(timeout_s):
                self.first = await self.next()
        except DeadlineError:
            raise
        except TimeoutError:
            raise StageUnavailableError("generate", f"no token after {timeout_s:g} s") from None

    async def next(self) -> Sequence[GeneratedText]:
        if first := self.first:
            self.first = ()
            return first
        pieces = await self.deadline.wait_for(self.answers.next())
        for piece in pieces:
            self.account.add(piece)
        return pieces

    async def next_run(self, num_tokens: int) -> Sequence[GeneratedText]:
        """Returns the next pieces of so many tokens together, or up to the end of an answer."""
        run = await self.next()
        if num_tokens == 1:
            return run
        held, number = list(run), sum(len(piece.token_ids) for piece in run)
        while run and number < num_tokens and all(piece.finish_reason is None for piece in run):
            run = await self.next()
            held += run
            number += sum(len(piece.token_ids) for piece in run)
        return joined(held)


@asynccontextmanager
async def _noting_end(body: PromptFields, account: RequestAccount) -> AsyncIterator[None]:
    """Gives a client's error the client's name for the field, and records a client that leaves."""
    try:
        yield
    except InvalidRequestError as error:
        raise body.in_terms_of_client(error) from error
    except (asyncio.CancelledError, GeneratorExit):
        account.abort()
        raise
