"""The routes that generate text: chat completions, completions, responses and messages."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from raylens.deployments.api.anthropic import AnswerMessage, MessagesRequest
from raylens.deployments.api.chat import ChatCompletion, ChatCompletionRequest
from raylens.deployments.api.completions import Completion, CompletionRequest
from raylens.deployments.api.generation import AnyGenerationFields, GenerationFields
from raylens.deployments.api.responses import ResponseObject, ResponsesRequest
from raylens.deployments.config import MetricsConfig
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.admission import OverloadedError
from raylens.deployments.endpoint.background import BackgroundJobs, Begun
from raylens.deployments.endpoint.call import ApiCall, HttpCall
from raylens.deployments.endpoint.chat_answer import ChatAnswer
from raylens.deployments.endpoint.completion_answer import CompletionAnswer
from raylens.deployments.endpoint.deadline import Deadline, DeadlineError
from raylens.deployments.endpoint.errors import (
    ANTHROPIC_ERROR_RESPONSES,
    ANTHROPIC_PATH,
    ERROR_RESPONSES,
    error_kind,
    error_response,
)
from raylens.deployments.endpoint.message_answer import MessageAnswer
from raylens.deployments.endpoint.request_cost import cost_of
from raylens.deployments.endpoint.response_answer import ResponseAnswer
from raylens.deployments.endpoint.served_models import ModelRoute, ServedModels
from raylens.deployments.endpoint.stored_responses import ResponseStore
from raylens.deployments.endpoint.tool_calls import forced_call, with_marks
from raylens.deployments.metrics.definitions import IngressMetrics
from raylens.deployments.pipeline.merged_answers import Answers, MergedAnswers
from raylens.deployments.server_log import process_name
from raylens.deployments.stages.stage_calls import MAX_ATTEMPTS, StageUnavailableError
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import InvalidRequestError, Stopwatch
from raylens.preprocess.tool_calls.formats import ToolCallFormat

logger = logging.getLogger(f"ray.serve.{__name__}")

ConversationT = TypeVar("ConversationT", ChatCompletionRequest, ResponsesRequest, MessagesRequest)

Answer = ChatAnswer | CompletionAnswer | ResponseAnswer | MessageAnswer
_Keep = Callable[[Answer], Awaitable[None]]
"""What happens with an answer that is whole, before its client has all of it."""

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second: for nginx


class EventStream(StreamingResponse):
    """Ray Serve cancels the request of a client that leaves. Starlette would listen for that in a task of its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


@dataclass(frozen=True)
class GenerationRoutes:
    models: ServedModels
    metrics: IngressMetrics
    goals: MetricsConfig
    first_token_timeout_s: float
    stored: ResponseStore
    jobs: BackgroundJobs

    def add_to(self, api: FastAPI) -> None:
        events = {"text/event-stream": {"schema": {"type": "object", "description": "where `stream` is true"}}}
        post = partial(api.add_api_route, methods=["POST"], responses={200: {"content": events}, **ERROR_RESPONSES})
        post("/v1/chat/completions", self.chat_completions, response_model=ChatCompletion)
        post("/v1/completions", self.completions, response_model=Completion)
        post("/v1/responses", self.responses, response_model=ResponseObject)
        own: dict[int | str, Any] = {200: {"content": events}, **ANTHROPIC_ERROR_RESPONSES}
        api.add_api_route(ANTHROPIC_PATH, self.messages, methods=["POST"], response_model=AnswerMessage, responses=own)

    async def chat_completions(self, body: ChatCompletionRequest, call: HttpCall) -> Response:
        """Answers a conversation that may hold pictures, videos and sounds, all at once or as server-sent events."""
        return await self._converse(body, call, "chatcmpl-", ChatAnswer)

    async def completions(self, body: CompletionRequest, call: HttpCall) -> Response:
        """Continues prompts of text or token ids, which may hold pictures, all at once or as server-sent events."""
        async with self._generation(body, call, "cmpl-") as generation:
            await generation.enter(body.sampling_params())
            echoes = await _echoes(generation.model, body) if body.echo else None
            return await generation.respond(lambda: CompletionAnswer(body, generation.account, echoes))

    async def responses(self, body: ResponsesRequest, call: HttpCall) -> Response:
        """Answers text and pictures, all at once or as typed events. The server keeps the answer, so that later
        requests can go on from it."""
        if body.background:
            response_id = f"resp_{body.request_id or call.request_id}"
            begun = await self.jobs.start(response_id, call, partial(self._respond_in_background, body))
            return Response(begun.model_dump_json(), media_type="application/json")
        await self.stored.recall(body, call)
        is_stored = self.stored.is_to_keep(body)
        make_answer = partial(ResponseAnswer, is_stored=is_stored)
        return await self._converse(body, call, "resp_", make_answer, self._keeping(body, call) if is_stored else None)

    def _keeping(self, body: ResponsesRequest, call: ApiCall) -> _Keep:
        async def keep(answer: Answer) -> None:
            assert isinstance(answer, ResponseAnswer)
            await self.stored.keep(body, call, answer.finished)

        return keep

    async def _respond_in_background(self, body: ResponsesRequest, call: ApiCall, begun: Begun) -> None:
        """See `background.Work`. What goes wrong later is the error of the stored response."""
        if not self.stored.keeps:
            raise InvalidRequestError("this server stores no responses", field="background")
        await self.stored.recall(body, call)
        async with self._generation(body, call, "resp_") as generation:
            form, params = _form_and_params(body, generation.model)
            make_answer = partial(ResponseAnswer, body, generation.account, form, is_stored=True)
            await self.stored.store(body, call, make_answer().begun("in_progress"))
            begun.set_result(make_answer().begun("queued"))
            try:
                await generation.enter_in_turn(params)
                await generation.complete(make_answer, self._keeping(body, call))
                generation.account.finish()
            except Exception as error:
                self.metrics.count_error(*error_kind(error))
                logger.warning("response %s: %s", generation.account.request_id, error)
                await self.stored.keep(body, call, make_answer().failed(error_response(error)[1]))

    async def messages(self, body: MessagesRequest, call: HttpCall) -> Response:
        """Answers a conversation in the form of Anthropic's API, all at once or as typed events. `max_tokens` has to be
        set there, so clients set it without regard to the context."""
        body.max_tokens = min(body.max_tokens, self.models.of(body.model).max_model_len or body.max_tokens)
        return await self._converse(body, call, "msg_", MessageAnswer)

    async def _converse(
        self,
        body: ConversationT,
        call: ApiCall,
        id_prefix: str,
        make_answer: Callable[[ConversationT, RequestAccount, ToolCallFormat | None], Answer],
        keep: _Keep | None = None,
    ) -> Response:
        async with self._generation(body, call, id_prefix) as generation:
            form, params = _form_and_params(body, generation.model)
            await generation.enter(params)
            return await generation.respond(lambda: make_answer(body, generation.account, form), keep)

    @asynccontextmanager
    async def _generation(self, body: AnyGenerationFields, call: ApiCall, prefix: str) -> "AsyncIterator[_Generation]":
        request_id = f"{prefix}{body.request_id or call.request_id}"
        account = RequestAccount(self.metrics, request_id, call.caller.name, self.goals)
        async with _noting_end(body, account):
            call.check_fields(body)
            model = self.models.of(body.model)
            account.model = body.model or model.name
            deadline = Deadline(call.arrived_at, call.timeout_s if body.timeout_s is None else body.timeout_s)
            yield _Generation(model, call, body, account, deadline, self.metrics, self.first_token_timeout_s)


@dataclass(frozen=True, slots=True)
class _Generation:
    """One request of a client, on its way through admission and the pipeline to its answer."""

    model: ModelRoute
    call: ApiCall
    body: AnyGenerationFields
    account: RequestAccount
    deadline: Deadline
    metrics: IngressMetrics
    first_token_timeout_s: float

    async def enter(self, params: SamplingParams) -> None:
        """Waits until there is room for the request. Raises OverloadedError or InvalidRequestError."""
        account, body, model = self.account, self.body, self.model
        priority = body.priority + self.call.caller.priority
        options = {
            "priority": priority,
            "cache_key": body.prompt_cache_key or body.session_id,
            "prompt_salt": body.cache_salt or "",
            "adapter": model.adapter_of(body.model),
            "returns_prompt_ids": isinstance(body, GenerationFields) and body.return_token_ids,
        }
        account.requests = [
            model.request(self.call, self._request_id(number), body, params, prompt_and_media, **options)
            for number, prompt_and_media in enumerate(body.prompts_and_media())
        ]
        account.num_answers = params.n
        model.ready_processor()  # raises before the wait
        self.call.traced.account = account
        cost = cost_of(account.requests, model.max_model_len)
        watch = Stopwatch()
        try:
            await self.deadline.wait_for(self.call.ticket.enter(cost, priority))
        finally:
            account.times.append(watch.read("admission_queue", process_name()))

    async def enter_in_turn(self, params: SamplingParams) -> None:
        """The same for a request that nobody waits for: it tries again as long as the queue is full."""
        while True:
            try:
                return await self.enter(params)
            except OverloadedError as error:
                await self.deadline.wait_for(asyncio.sleep(error.retry_after_s))

    def _request_id(self, number: int) -> str:
        return self.account.request_id + (f"-{number}" if isinstance(self.body, CompletionRequest) else "")

    async def respond(self, make_answer: Callable[[], Answer], keep: _Keep | None = None) -> Response:
        if not self.body.stream:
            completion = await self.complete(make_answer, keep)
            self.account.finish()
            return Response(completion.model_dump_json(), media_type="application/json")
        async with AsyncExitStack() as stack:
            answers = await self._begin(stack)
            events = self._events(make_answer(), answers, stack.pop_all(), keep)
            return EventStream(events, media_type="text/event-stream", headers=_STREAM_HEADERS)

    async def _begin(self, stack: AsyncExitStack) -> "_CountedAnswers":
        """Returns the answers once the first piece has come: an earlier failure is an HTTP error. `stack` closes
        them."""
        account, model = self.account, self.model
        stack.callback(account.observe_gaps)
        processor = model.ready_processor()
        parts = [model.pipeline.request(request, processor) for request in account.requests]
        answers = parts[0] if len(parts) == 1 else MergedAnswers(parts, num_answers=account.num_answers)
        stack.push_async_callback(answers.aclose)
        counted = _CountedAnswers(answers, account, self.deadline)
        stages = {stage for request in account.requests for stage in request.stages}
        async with model.monitor.while_there(stages):
            await counted.wait_for_first(self.first_token_timeout_s)
        return counted

    async def complete(self, make_answer: Callable[[], Answer], keep: _Keep | None) -> BaseModel:
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
        self, answer: Answer, answers: "_CountedAnswers", stack: AsyncExitStack, keep: _Keep | None
    ) -> AsyncIterator[str]:
        """Yields server-sent events. An error becomes an event and ends the stream. `stack` closes `answers`."""
        async with stack:
            try:
                async with _noting_end(self.body, self.account):
                    if events := answer.first_events():
                        yield events
                    while pieces := await answers.next():
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

    async def wait_for_first(self, timeout_s: float) -> None:
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


def _form_and_params(
    body: ChatCompletionRequest | ResponsesRequest | MessagesRequest, model: ModelRoute
) -> tuple[ToolCallFormat | None, SamplingParams]:
    """Returns the form of the answer's tool calls, if there can be any, and the parameters of its tokens."""
    form = model.tool_calls if body.offered.tools else None
    return form, with_marks(body.sampling_params(forced_call(form, body.offered)), form)


async def _echoes(model: ModelRoute, body: CompletionRequest) -> list[str]:
    """Returns the text of each prompt. The answer completes an unfinished character at the end of token ids."""
    return [
        prompt
        if isinstance(prompt, str)
        else (await model.pipeline.detokenize(prompt)).rstrip("\N{REPLACEMENT CHARACTER}")
        for prompt in body.prompts
    ]


@asynccontextmanager
async def _noting_end(body: AnyGenerationFields, account: RequestAccount) -> AsyncIterator[None]:
    """Gives a client's error the client's name for the field, and records a client that leaves."""
    try:
        yield
    except InvalidRequestError as error:
        raise body.in_terms_of_client(error) from error
    except (asyncio.CancelledError, GeneratorExit):
        account.abort()
        raise
