"""The HTTP endpoint: OpenAI-compatible routes, server-sent events, errors in OpenAI's form."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Header
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray.serve.handle import DeploymentHandle

from deployments.accounting import RequestAccount
from deployments.answer import Answer
from deployments.config import AppConfig
from deployments.errors import add_error_handlers, error_response
from deployments.health import StageMonitor
from deployments.media_items import PipelineRequest
from deployments.metrics import IngressMetrics
from deployments.metrics_export import export_metrics
from deployments.page_route import Page
from deployments.pipeline import Pipeline
from deployments.protocol import ChatCompletion, ChatCompletionRequest, ErrorResponse, ModelCard, ModelList
from deployments.stage_calls import StageUnavailableError
from deployments.stage_messages import GeneratedText
from preprocess.hasher import content_hash
from preprocess.schema import ChatPrompt, InvalidRequestError

logger = logging.getLogger("ray.serve")

_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorResponse} for status in (400, 404, 500, 503)}


def _tenant_salt(authorization: str | None) -> str:
    """Clients with different API keys share neither items nor names for them. (Whether a key is valid is not asked.)"""
    return content_hash((authorization or "").encode())


class Ingress:
    """One replica of the endpoint. Wrapped by `serve.ingress` in `deployments.app`."""

    def __init__(
        self,
        config: AppConfig,
        preprocess: DeploymentHandle[Any],
        encode: DeploymentHandle[Any],
        generate: DeploymentHandle[Any],
    ) -> None:
        self._model_name = config.model_name
        self._created = int(time.time())
        self._first_token_timeout_s = config.ingress.first_token_timeout_s
        self._metrics = IngressMetrics()
        self._monitor = StageMonitor(
            {"preprocess": preprocess, "generate": generate}
            | ({} if config.encoder == "inline" else {"encode": encode}),
            period_s=config.ingress.health_period_s,
            timeout_s=config.ingress.health_timeout_s,
        )
        # Whoever encodes is seen when it does.
        homes = {"encode": "generate"} if config.encoder == "inline" else {}
        self._pipeline = Pipeline(
            config,
            preprocess,
            encode,
            generate,
            self._metrics,
            on_reply=lambda stage: self._monitor.saw(homes.get(stage, stage)),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Ray Serve calls once the replica is made: the routes, bound to this object."""
        api = FastAPI(
            title="Raylens",
            description="Vision-language models behind an OpenAI-compatible API.",
            lifespan=self._lifespan,
        )
        route = api.add_api_route
        chat = "/v1/chat/completions"
        route(chat, self.chat_completions, methods=["POST"], response_model=ChatCompletion, responses=_ERRORS)
        route("/v1/models", self.models, methods=["GET"])
        route("/v1/models/{model:path}", self.model, methods=["GET"], responses=_ERRORS)
        route("/health", self.health, methods=["GET"], response_model=None)
        route("/metrics", self.metrics, methods=["GET"], response_model=None)
        route("/", Page().respond, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
        add_error_handlers(api)
        return api

    @asynccontextmanager
    async def _lifespan(self, api: FastAPI) -> AsyncIterator[None]:
        reporter = asyncio.create_task(self._report_caches_forever())
        yield
        reporter.cancel()
        self._monitor.close()
        await self._pipeline.close()

    async def chat_completions(
        self, body: ChatCompletionRequest, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
    ) -> Response:
        """Answers a conversation that may hold pictures, all at once or as server-sent events."""
        account = RequestAccount(self._metrics)
        try:
            return await self._answer(body, account, _tenant_salt(authorization))
        except BaseException as error:
            self._note_failure(account, error)
            raise

    async def _answer(self, body: ChatCompletionRequest, account: RequestAccount, tenant_salt: str) -> Response:
        self._check_model(body.model)
        processor = self._monitor.processor
        if processor is None:
            raise StageUnavailableError("preprocess", "the stages are still starting")
        request = PipelineRequest(
            request_id=account.request_id,
            prompt=ChatPrompt(body.template_messages()),
            media=body.media(),
            params=body.sampling_params(),
            options=body.mm_processor_kwargs or {},
            tenant_salt=tenant_salt,
        )
        answer = Answer(body, request, account)
        async with AsyncExitStack() as stack:
            pieces = self._pipeline.run(request, processor)
            await stack.enter_async_context(aclosing(pieces))
            # The status line waits for the first piece: whatever fails before it is a proper HTTP error.
            first = await self._first(pieces)
            if body.stream:
                events = self._events(answer, account, first, pieces, stack.pop_all())
                return StreamingResponse(events, media_type="text/event-stream")
            completion = await answer.complete(first, pieces)
        return Response(completion.model_dump_json(exclude_none=True), media_type="application/json")

    async def _first(self, pieces: AsyncGenerator[GeneratedText]) -> GeneratedText:
        try:
            async with asyncio.timeout(self._first_token_timeout_s):
                return await anext(pieces)
        except TimeoutError:
            raise StageUnavailableError("generate", f"no token after {self._first_token_timeout_s:g} s") from None

    async def models(self) -> ModelList:
        """The one model that is served."""
        return ModelList(data=[ModelCard(id=self._model_name, created=self._created)])

    async def model(self, model: str) -> ModelCard:
        self._check_model(model)
        return ModelCard(id=self._model_name, created=self._created)

    async def health(self) -> JSONResponse:
        """200 when every stage is ready, else 503; the body says which is not."""
        status = 200 if self._monitor.is_ready else 503
        return JSONResponse({"ready": self._monitor.is_ready, "stages": self._monitor.states()}, status)

    async def metrics(self) -> Response:
        """All stages' metrics, for Prometheus."""
        return Response(await export_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _check_model(self, model: str) -> None:
        if model != self._model_name:
            raise InvalidRequestError(
                f"{model[:100]!r} is not served here, only {self._model_name!r}",
                field="model",
                code="model_not_found",
                status=404,
            )

    async def _events(
        self,
        answer: Answer,
        account: RequestAccount,
        first: GeneratedText,
        pieces: AsyncGenerator[GeneratedText],
        stack: AsyncExitStack,
    ) -> AsyncIterator[str]:
        """Server-sent events; an error in mid-stream is an event of its own and ends them. `stack` closes `pieces`."""
        async with stack:
            try:
                async for chunk in answer.chunks(first, pieces):
                    yield f"data: {chunk.model_dump_json(exclude_none=True)}\n\n"
            except BaseException as error:
                self._note_failure(account, error)
                if not isinstance(error, Exception):
                    raise
                yield f"data: {error_response(error)[1].model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"

    def _note_failure(self, account: RequestAccount, error: BaseException) -> None:
        account.fail(error)
        if isinstance(error, Exception) and not isinstance(error, InvalidRequestError):
            logger.error("request %s failed", account.request_id, exc_info=error)

    async def _report_caches_forever(self) -> None:
        while True:
            self._metrics.mm_cache.report(self._pipeline.items.processed.stats)
            self._metrics.encoder_cache.report(self._pipeline.items.embeddings.stats)
            await asyncio.sleep(1.0)
