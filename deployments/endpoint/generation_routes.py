"""The routes that generate text: chat completions, completions and responses."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Self, TypeVar

from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from raylens.deployments.api.chat import ChatCompletion, ChatCompletionRequest
from raylens.deployments.api.completions import Completion, CompletionRequest
from raylens.deployments.api.generation import AnyGenerationFields, GenerationFields
from raylens.deployments.api.responses import ResponseObject, ResponsesRequest
from raylens.deployments.config import MetricsConfig
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.answer import Answer, Pieces
from raylens.deployments.endpoint.call import ApiCall, HttpCall
from raylens.deployments.endpoint.chat_answer import ChatAnswer
from raylens.deployments.endpoint.completion_answer import CompletionAnswer
from raylens.deployments.endpoint.deadline import Deadline, DeadlineError
from raylens.deployments.endpoint.errors import ERROR_RESPONSES, error_response
from raylens.deployments.endpoint.request_cost import cost_of
from raylens.deployments.endpoint.response_answer import ResponseAnswer
from raylens.deployments.endpoint.served_models import ModelRoute, ServedModels
from raylens.deployments.endpoint.tool_calls import forced_call
from raylens.deployments.metrics.definitions import IngressMetrics
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.deployments.pipeline.merged_pieces import merged
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.server_log import process_name
from raylens.deployments.stages.stage_calls import MAX_ATTEMPTS, StageUnavailableError
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import InvalidRequestError, Prompt, Stopwatch, ToolCallFormat

logger = logging.getLogger(f"ray.serve.{__name__}")

ConversationT = TypeVar("ConversationT", ChatCompletionRequest, ResponsesRequest)

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second: for nginx


class GenerationRoutes:
    """Receives requests, sends them through the pipeline, and formats their answers for the API."""

    def __init__(
        self, models: ServedModels, metrics: IngressMetrics, goals: MetricsConfig, first_token_timeout_s: float
    ) -> None:
        self._models = models
        self._metrics = metrics
        self._goals = goals
        self._first_token_timeout_s = first_token_timeout_s

    def add_to(self, api: FastAPI) -> None:
        events = {"text/event-stream": {"schema": {"type": "object", "description": "where `stream` is true"}}}
        answers = {200: {"content": events}, **ERROR_RESPONSES}

        def post(path: str, endpoint: Any, model: Any) -> None:
            api.add_api_route(path, endpoint, methods=["POST"], response_model=model, responses=answers)

        post("/v1/chat/completions", self.chat_completions, ChatCompletion)
        post("/v1/completions", self.completions, Completion)
        post("/v1/responses", self.responses, ResponseObject)

    async def chat_completions(self, body: ChatCompletionRequest, call: HttpCall) -> Response:
        """Answers a conversation that may hold pictures and videos, all at once or as server-sent events."""
        return await self._converse(body, call, "chatcmpl-", ChatAnswer)

    async def completions(self, body: CompletionRequest, call: HttpCall) -> Response:
        """Continues prompts of text or token ids, which may hold pictures, all at once or as server-sent events."""
        account = self._account(f"cmpl-{body.request_id or call.request_id}", call)
        async with _noting_end(body, account):
            call.check_fields(body)
            model = self._models.of(body.model)
            account.model = body.model or model.status.name
            params = body.sampling_params()
            account.requests = [
                self._request(model, call, f"{account.request_id}-{number}", body, params, one)
                for number, one in enumerate(body.prompts_and_media())
            ]
            account.num_answers = params.n
            await self._enter(model, call, body, account)
            echoes = await self._echoes(model, body) if body.echo else None
            return await self._answer(model, call, body, account, lambda: CompletionAnswer(body, account, echoes))

    async def responses(self, body: ResponsesRequest, call: HttpCall) -> Response:
        """Answers text and pictures, all at once or as typed events. The server keeps nothing of it."""
        return await self._converse(body, call, "resp_", ResponseAnswer)

    async def _converse(
        self,
        body: ConversationT,
        call: ApiCall,
        id_prefix: str,
        make_answer: Callable[[ConversationT, RequestAccount, ToolCallFormat | None], Answer],
    ) -> Response:
        """Answers one conversation, in the form of `make_answer`."""
        account = self._account(f"{id_prefix}{body.request_id or call.request_id}", call)
        async with _noting_end(body, account):
            call.check_fields(body)
            model = self._models.of(body.model)
            account.model = body.model or model.status.name
            form = model.status.tool_calls if body.offered.tools else None
            params = body.sampling_params(forced_call(form, body.offered))
            account.requests = [
                self._request(model, call, account.request_id, body, params, (body.to_prompt(), body.media()))
            ]
            account.num_answers = params.n
            await self._enter(model, call, body, account)
            return await self._answer(model, call, body, account, lambda: make_answer(body, account, form))

    def _account(self, request_id: str, call: ApiCall) -> RequestAccount:
        return RequestAccount(self._metrics, request_id, call.caller.name, self._goals)

    async def _enter(
        self, model: ModelRoute, call: ApiCall, body: AnyGenerationFields, account: RequestAccount
    ) -> None:
        """Waits until there is room for the request. Raises OverloadedError or InvalidRequestError."""
        model.status.ready_processor()  # raises before the wait
        call.traced.follow(account)
        cost = cost_of(account.requests, model.status.max_model_len)
        watch = Stopwatch()
        try:
            await call.deadline(body.timeout_s).wait_for(call.ticket.enter(cost, _priority(call, body)))
        finally:
            account.times.append(watch.read("admission_queue", process_name()))

    def _request(
        self,
        model: ModelRoute,
        call: ApiCall,
        request_id: str,
        body: AnyGenerationFields,
        params: SamplingParams,
        prompt_and_media: tuple[Prompt, list[MediaSource]],
    ) -> PipelineRequest:
        return model.requests.make(
            call,
            request_id,
            body,
            params,
            prompt_and_media,
            priority=_priority(call, body),
            cache_key=body.prompt_cache_key,
            adapter=model.status.adapter_of(body.model),
            returns_prompt_ids=isinstance(body, GenerationFields) and body.return_token_ids,
        )

    async def _echoes(self, model: ModelRoute, body: CompletionRequest) -> list[str]:
        """Returns the text of each prompt, as the client sent it. An unfinished character at the end of token ids is
        omitted, because the answer completes it."""
        return [
            prompt if isinstance(prompt, str) else (await model.pipeline.detokenize(prompt)).rstrip(_BROKEN)
            for prompt in body.prompts
        ]

    async def _answer(
        self,
        model: ModelRoute,
        call: ApiCall,
        body: AnyGenerationFields,
        account: RequestAccount,
        make_answer: Callable[[], Answer],
    ) -> Response:
        deadline = call.deadline(body.timeout_s)
        if not body.stream:
            completion = await self._complete(model, account, deadline, make_answer)
            account.finish()
            return Response(completion.model_dump_json(), media_type="application/json")
        async with AsyncExitStack() as stack:
            pieces = await self._begin(model, account, deadline, stack)
            events = self._events(call, body, account, make_answer(), pieces, stack.pop_all())
            return StreamingResponse(events, media_type="text/event-stream", headers=_STREAM_HEADERS)

    async def _begin(
        self, model: ModelRoute, account: RequestAccount, deadline: Deadline, stack: AsyncExitStack
    ) -> "_AccountedPieces":
        """Returns the pieces once the first has come; `stack` closes them. The status line waits for the first piece,
        so that an earlier failure becomes a proper HTTP error."""
        stack.callback(account.observe_gaps)
        processor = model.status.ready_processor()
        streams = [model.pipeline.run(request, processor) for request in account.requests]
        answers = streams[0] if len(streams) == 1 else merged(streams, num_answers=account.num_answers)
        pieces = _AccountedPieces(await stack.enter_async_context(aclosing(answers)), account, deadline)
        stages = {stage for request in account.requests for stage in request.stages}
        async with model.monitor.while_there(stages):
            await pieces.wait_for_first(self._first_token_timeout_s)
        return pieces

    async def _complete(
        self, model: ModelRoute, account: RequestAccount, deadline: Deadline, make_answer: Callable[[], Answer]
    ) -> BaseModel:
        """Returns the whole answer. Nobody has seen any of it before, so it is retried elsewhere if a replica dies."""
        for attempt in range(MAX_ATTEMPTS):
            async with AsyncExitStack() as stack:
                pieces = await self._begin(model, account, deadline, stack)
                try:
                    return await make_answer().complete(pieces)
                except StageUnavailableError as error:
                    if attempt == MAX_ATTEMPTS - 1:
                        raise
                    logger.warning("request %s: %s, making its answer again", account.request_id, error)
                    self._metrics.items_recomputed.inc(stage=error.stage, reason="AnswerLost")
            account.begin_again()
        raise AssertionError("the last attempt returns or raises")

    async def _events(
        self,
        call: ApiCall,
        body: AnyGenerationFields,
        account: RequestAccount,
        answer: Answer,
        pieces: Pieces,
        stack: AsyncExitStack,
    ) -> AsyncIterator[str]:
        """Yields server-sent events. An error in mid-stream becomes an event and ends the stream. `stack` closes
        `pieces`."""
        async with stack:
            try:
                async with _noting_end(body, account):
                    async for event in answer.events(pieces):
                        yield event
                    account.finish()
            except Exception as error:
                call.fail(error)
                yield answer.error_event(error_response(error)[1])
            yield answer.last_event


class _AccountedPieces:
    """The pieces of a client's answers, counted as they come. The iterator also yields the pieces of `wait_for_first`.
    Raises DeadlineError at the client's deadline."""

    def __init__(
        self, answers: AsyncGenerator[Sequence[GeneratedText]], account: RequestAccount, deadline: Deadline
    ) -> None:
        self._answers = answers
        self._account = account
        self._deadline = deadline
        self._first: Sequence[GeneratedText] = ()

    async def wait_for_first(self, timeout_s: float) -> None:
        """Waits for the first piece. Raises StageUnavailableError after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                self._first = await anext(self)
        except DeadlineError:
            raise
        except TimeoutError:
            raise StageUnavailableError("generate", f"no token after {timeout_s:g} s") from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[GeneratedText]:
        if first := self._first:
            self._first = ()
            return first
        ready = await self._deadline.wait_for(anext(self._answers))
        for piece in ready:
            self._account.add(piece)
        return ready


def _priority(call: ApiCall, body: AnyGenerationFields) -> int:
    return body.priority + call.caller.priority


@asynccontextmanager
async def _noting_end(body: AnyGenerationFields, account: RequestAccount) -> AsyncIterator[None]:
    """Gives a client's error the client's name for the field, and records a client that leaves."""
    try:
        yield
    except InvalidRequestError as error:
        raise body.named(error) from error
    except Exception:
        raise
    except BaseException:
        account.abort()
        raise
