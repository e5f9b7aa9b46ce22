"""The routes `/tokenize`, `/detokenize` and `/render`, which show what a prompt becomes."""

from fastapi import FastAPI

from deployments.api.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    RenderedItem,
    RenderRequest,
    RenderResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from deployments.endpoint.call import HttpCall
from deployments.endpoint.errors import ERROR_RESPONSES
from deployments.endpoint.health import StageMonitor
from deployments.endpoint.model_status import ModelStatus
from deployments.endpoint.request_weight import WeighedRequests, weigh_text
from deployments.pipeline.pipeline import Pipeline
from deployments.shared.weight import Weight
from llm.sampling_params import SamplingParams
from preprocess.schema import ChatPrompt


class TokenRoutes:
    def __init__(self, model: ModelStatus, monitor: StageMonitor, pipeline: Pipeline, weighed: WeighedRequests) -> None:
        self._model = model
        self._monitor = monitor
        self._pipeline = pipeline
        self._weighed = weighed

    def add_to(self, api: FastAPI) -> None:
        for path, endpoint in (
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
            ("/render", self.render),
        ):
            api.add_api_route(path, endpoint, methods=["POST"], responses=ERROR_RESPONSES)

    async def tokenize(self, body: TokenizeRequest, call: HttpCall) -> TokenizeResponse:
        """Returns the token ids of a text or of a conversation without media."""
        call.check_fields(body)
        self._model.check_model(body.model)
        prompt = body.to_prompt()
        num_chars = prompt.num_chars if isinstance(prompt, ChatPrompt) else len(prompt.text)
        await call.ticket.enter(weigh_text(num_chars), call.caller.priority)
        async with self._monitor.while_there(["preprocess"]):
            ids = await self._pipeline.tokenize(prompt, add_special_tokens=body.add_special_tokens)
        return TokenizeResponse(count=len(ids), max_model_len=self._model.max_model_len, tokens=ids)

    async def detokenize(self, body: DetokenizeRequest, call: HttpCall) -> DetokenizeResponse:
        """Returns the text of token ids."""
        call.check_fields(body)
        self._model.check_model(body.model)
        await call.ticket.enter(Weight(requests=1, tokens=len(body.tokens)), call.caller.priority)
        async with self._monitor.while_there(["preprocess"]):
            return DetokenizeResponse(prompt=await self._pipeline.detokenize(body.tokens))

    async def render(self, body: RenderRequest, call: HttpCall) -> RenderResponse:
        """Returns what the language model would get for a prompt: token ids, and where in them each item's embeddings
        go."""
        call.check_fields(body)
        self._model.check_model(body.model)
        processor = self._model.ready_processor()
        request = self._weighed(
            call, f"render-{call.request_id}", body, SamplingParams(max_tokens=body.max_tokens), body.to_prompt()
        )
        await call.ticket.enter(self._weighed.weigh([request], self._model.max_model_len), call.caller.priority)
        async with self._monitor.while_there(["shared", "preprocess"]):
            rendered, modalities = await self._pipeline.render(request, processor)
        items = [
            RenderedItem(modality=modality, mm_hash=key, offset=at.offset, length=at.length, num_embeds=at.num_embeds)
            for modality, key, at in zip(modalities, rendered.mm_hashes, rendered.placeholders, strict=True)
        ]
        return RenderResponse(
            prompt_token_ids=rendered.prompt_token_ids, items=items, max_model_len=self._model.max_model_len
        )
