"""Prompts as token ids, and their number, without generation: `/tokenize`, `/detokenize`, `/render`,
`/v1/responses/input_tokens` and `/v1/messages/count_tokens`."""

from functools import partial

from fastapi import FastAPI

from raylens.deployments.api import tokens
from raylens.deployments.api.anthropic import ConversationFields, CountedTokens
from raylens.deployments.api.generation import AnyGenerationFields
from raylens.deployments.api.prompt_fields import MediaFields
from raylens.deployments.api.responses import InputTokens, ResponsesRequest
from raylens.deployments.endpoint.call import ApiCall, HttpCall
from raylens.deployments.endpoint.errors import ANTHROPIC_ERROR_RESPONSES, ANTHROPIC_PATH, ERROR_RESPONSES
from raylens.deployments.endpoint.request_cost import RequestCost, cost_of, cost_of_text
from raylens.deployments.endpoint.served_models import ServedModels
from raylens.deployments.endpoint.stored_responses import ResponseStore
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ChatPrompt, InvalidRequestError, ProcessedPrompt, Prompt


class TokenRoutes:
    def __init__(self, models: ServedModels, stored: ResponseStore) -> None:
        self._models = models
        self._stored = stored

    def add_to(self, api: FastAPI) -> None:
        post = partial(api.add_api_route, methods=["POST"], responses=ERROR_RESPONSES)
        post("/tokenize", self.tokenize)
        post("/detokenize", self.detokenize)
        post("/render", self.render)
        post("/v1/responses/input_tokens", self.count_input_tokens)
        api.add_api_route(
            f"{ANTHROPIC_PATH}/count_tokens", self.count_tokens, methods=["POST"], responses=ANTHROPIC_ERROR_RESPONSES
        )

    async def tokenize(self, body: tokens.TokenizeRequest, call: HttpCall) -> tokens.TokenizeResponse:
        """Returns the token ids of a text or of a conversation without media."""
        call.check_fields(body)
        model = self._models.of(body.model)
        prompt = body.to_prompt()
        num_chars = prompt.num_chars if isinstance(prompt, ChatPrompt) else len(prompt.text)
        await call.ticket.enter(cost_of_text(num_chars), call.caller.priority)
        async with model.monitor.while_there(["preprocess"]):
            ids = await model.pipeline.tokenize(prompt, add_special_tokens=body.add_special_tokens)
        return tokens.TokenizeResponse(count=len(ids), max_model_len=model.max_model_len, tokens=ids)

    async def detokenize(self, body: tokens.DetokenizeRequest, call: HttpCall) -> tokens.DetokenizeResponse:
        """Returns the text of token ids."""
        call.check_fields(body)
        model = self._models.of(body.model)
        await call.ticket.enter(RequestCost(requests=1, tokens=len(body.tokens)), call.caller.priority)
        async with model.monitor.while_there(["preprocess"]):
            return tokens.DetokenizeResponse(prompt=await model.pipeline.detokenize(body.tokens))

    async def render(self, body: tokens.RenderRequest, call: HttpCall) -> tokens.RenderResponse:
        """Returns what the language model would get for a prompt: token ids, and where in them each item's embeddings
        go."""
        params = SamplingParams(max_tokens=body.max_tokens)
        rendered, modalities = await self._rendered(body, body.model, call, params, body.prompt_and_media())
        items = [
            tokens.RenderedItem(
                modality=modality, mm_hash=key, offset=at.offset, length=at.length, num_embeds=at.num_embeds
            )
            for modality, key, at in zip(modalities, rendered.mm_hashes, rendered.placeholders, strict=True)
        ]
        ids = rendered.prompt_token_ids
        length = self._models.of(body.model).max_model_len
        return tokens.RenderResponse(prompt_token_ids=ids, items=items, max_model_len=length)

    async def count_tokens(self, body: ConversationFields, call: HttpCall) -> CountedTokens:
        """Returns the number of tokens of a prompt of Anthropic's API."""
        return CountedTokens(input_tokens=await self._num_tokens(body, call))

    async def count_input_tokens(self, body: ResponsesRequest, call: HttpCall) -> InputTokens:
        """Returns the number of tokens of a prompt of the Responses API."""
        await self._stored.recall(body, call)
        return InputTokens(input_tokens=await self._num_tokens(body, call))

    async def _num_tokens(self, body: AnyGenerationFields, call: ApiCall) -> int:
        try:
            (prompt_and_media,) = body.prompts_and_media()
            rendered, _ = await self._rendered(body, body.model, call, SamplingParams(), prompt_and_media)
        except InvalidRequestError as error:
            raise body.in_terms_of_client(error) from error
        return len(rendered.prompt_token_ids)

    async def _rendered(
        self,
        body: MediaFields,
        model_name: str | None,
        call: ApiCall,
        params: SamplingParams,
        prompt_and_media: tuple[Prompt, list[MediaSource]],
    ) -> tuple[ProcessedPrompt, list[str]]:
        """Returns the prompt with its items, and their modalities."""
        call.check_fields(body)
        model = self._models.of(model_name)
        processor = model.ready_processor()
        (opened,) = await model.opened(call, [prompt_and_media])
        request = model.request(call, f"render-{call.request_id}", body, params, opened)
        await call.ticket.enter(cost_of([request], model.max_model_len), call.caller.priority)
        async with model.monitor.while_there(["shared", "preprocess"]):
            return await model.pipeline.render(request, processor)
