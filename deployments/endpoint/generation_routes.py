"""The routes that generate text: chat completions, completions, responses and messages."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.responses import Response

from raylens.deployments.api.anthropic import AnswerMessage, MessagesRequest
from raylens.deployments.api.chat import ChatCompletion, ChatCompletionRequest
from raylens.deployments.api.completions import Completion, CompletionRequest
from raylens.deployments.api.responses import ResponseObject, ResponsesRequest
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.background import BackgroundJobs, Begun
from raylens.deployments.endpoint.call import ApiCall, HttpCall
from raylens.deployments.endpoint.chat_answer import ChatAnswer
from raylens.deployments.endpoint.completion_answer import CompletionAnswer
from raylens.deployments.endpoint.errors import (
    ANTHROPIC_ERROR_RESPONSES,
    ANTHROPIC_PATH,
    ERROR_RESPONSES,
    error_kind,
    error_response,
)
from raylens.deployments.endpoint.generation import Answer, Generations, Keep
from raylens.deployments.endpoint.message_answer import MessageAnswer
from raylens.deployments.endpoint.response_answer import ResponseAnswer
from raylens.deployments.endpoint.served_models import ModelRoute
from raylens.deployments.endpoint.stored_responses import ResponseStore
from raylens.deployments.endpoint.tool_calls import forced_call, with_marks
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import InvalidRequestError
from raylens.preprocess.tool_calls.formats import ToolCallFormat

logger = logging.getLogger(f"ray.serve.{__name__}")

ConversationT = TypeVar("ConversationT", ChatCompletionRequest, ResponsesRequest, MessagesRequest)


@dataclass(frozen=True)
class GenerationRoutes:
    generations: Generations
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
        async with self.generations.begin(body, call, "cmpl-") as generation:
            await generation.enter(body.sampling_params(), body.prompts_and_media())
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

    def _keeping(self, body: ResponsesRequest, call: ApiCall) -> Keep:
        async def keep(answer: Answer) -> None:
            assert isinstance(answer, ResponseAnswer)
            await self.stored.keep(body, call, answer.finished)

        return keep

    async def _respond_in_background(self, body: ResponsesRequest, call: ApiCall, begun: Begun) -> None:
        """See `background.Work`. What goes wrong later is the error of the stored response."""
        if not self.stored.keeps:
            raise InvalidRequestError("this server stores no responses", field="background")
        await self.stored.recall(body, call)
        async with self.generations.begin(body, call, "resp_") as generation:
            form, params = _form_and_params(body, generation.model)
            make_answer = partial(ResponseAnswer, body, generation.account, form, is_stored=True)
            await self.stored.store(body, call, make_answer().begun("in_progress"))
            begun.set_result(make_answer().begun("queued"))
            try:
                await generation.enter_in_turn(params, body.prompts_and_media())
                await generation.complete(make_answer, self._keeping(body, call))
                generation.account.finish()
            except Exception as error:
                self.generations.metrics.count_error(*error_kind(error))
                logger.warning("response %s: %s", generation.account.request_id, error)
                await self.stored.keep(body, call, make_answer().failed(error_response(error)[1]))

    async def messages(self, body: MessagesRequest, call: HttpCall) -> Response:
        """Answers a conversation in the form of Anthropic's API, all at once or as typed events. `max_tokens` has to be
        set there, so clients set it without regard to the context."""
        body.max_tokens = min(body.max_tokens, self.generations.models.of(body.model).max_model_len or body.max_tokens)
        return await self._converse(body, call, "msg_", MessageAnswer)

    async def _converse(
        self,
        body: ConversationT,
        call: ApiCall,
        id_prefix: str,
        make_answer: Callable[[ConversationT, RequestAccount, ToolCallFormat | None], Answer],
        keep: Keep | None = None,
    ) -> Response:
        async with self.generations.begin(body, call, id_prefix) as generation:
            form, params = _form_and_params(body, generation.model)
            await generation.enter(params, body.prompts_and_media())
            return await generation.respond(lambda: make_answer(body, generation.account, form), keep)


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
