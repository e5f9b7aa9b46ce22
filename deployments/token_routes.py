"""The routes that say what becomes of a prompt: `/tokenize`, `/detokenize` and `/render`."""

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
from deployments.call import HttpCall
from deployments.errors import ERROR_RESPONSES
from deployments.media_items import PipelineRequest
from deployments.pipeline import Pipeline
from deployments.request_weight import fetched_weight, weigh
from deployments.served import Served
from deployments.stage_calls import StageUnavailableError
from llm.sampling_params import SamplingParams
from preprocess.media import MediaLimits


class TokenRoutes:
    def __init__(self, served: Served, pipeline: Pipeline, limits: MediaLimits) -> None:
        self._served = served
        self._pipeline = pipeline
        self._limits = limits

    def add_to(self, api: FastAPI) -> None:
        for path, endpoint in (
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
            ("/render", self.render),
        ):
            api.add_api_route(path, endpoint, methods=["POST"], responses=ERROR_RESPONSES)

    async def tokenize(self, body: TokenizeRequest, call: HttpCall) -> TokenizeResponse:
        """The token ids of a text or of a conversation without media."""
        self._served.check_model(body.model)
        ids = await self._pipeline.tokenize(body.to_prompt(), add_special_tokens=body.add_special_tokens)
        return TokenizeResponse(count=len(ids), max_model_len=self._served.max_model_len, tokens=ids)

    async def detokenize(self, body: DetokenizeRequest, call: HttpCall) -> DetokenizeResponse:
        """The text of token ids."""
        self._served.check_model(body.model)
        return DetokenizeResponse(prompt=await self._pipeline.detokenize(body.tokens))

    async def render(self, body: RenderRequest, call: HttpCall) -> RenderResponse:
        """What the language model would get for a prompt: token ids, and where in them each item's embeddings go."""
        self._served.check_model(body.model)
        if self._served.processor is None:
            raise StageUnavailableError("preprocess", "the stages are still starting")
        prompt, media = body.to_prompt()
        request = PipelineRequest(
            request_id=f"render-{call.request_id}",
            prompt=prompt,
            media=media,
            params=SamplingParams(max_tokens=1),
            options=body.mm_processor_kwargs or {},
            tenant_salt=call.tenant_salt,
            max_prompt_tokens=body.max_prompt_tokens(body.max_tokens),
            on_fetched=lambda source, content: call.ticket.take(fetched_weight(source, content, self._limits)),
        )
        await call.ticket.enter(weigh([request], self._limits), priority=0)
        rendered, modalities = await self._pipeline.render(request, self._served.processor)
        items = [
            RenderedItem(modality=modality, mm_hash=key, offset=at.offset, length=at.length, num_embeds=at.num_embeds)
            for modality, key, at in zip(modalities, rendered.mm_hashes, rendered.placeholders, strict=True)
        ]
        return RenderResponse(
            prompt_token_ids=rendered.prompt_token_ids, items=items, max_model_len=self._served.max_model_len
        )
