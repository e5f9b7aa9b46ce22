"""The stages of one model behind the endpoint."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ray import ObjectRef
from ray.serve.handle import DeploymentHandle

from raylens.deployments.config import MediaConfig
from raylens.deployments.item_store.shared_items import SharedItems, SharedUploads
from raylens.deployments.metrics.definitions import IngressMetrics
from raylens.deployments.pipeline.documents import PageBudget, with_pages
from raylens.deployments.pipeline.media_items import MediaItems, all_or_none
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.deployments.pipeline.piece_receiver import PieceReceiver
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.pipeline.request import Request
from raylens.deployments.pipeline.turns import Turns
from raylens.deployments.ray_internals.calls_ahead import results_of
from raylens.deployments.ray_internals.handles import by_grpc
from raylens.deployments.stages.stage_calls import StageCalls, call_of
from raylens.preprocess.schema import (
    ChatPrompt,
    InvalidRequestError,
    ItemInfo,
    ProcessedPrompt,
    ProcessorIdentity,
    Prompt,
    TextPrompt,
)


class Pipeline:
    """Sends requests through the stages of one model. `generate` and `generate_by_grpc`: handles of the method.
    `chooses_by_prefix`: Generate has several replicas, and a prompt goes to the one with its cached prefix."""

    def __init__(
        self,
        config: MediaConfig,
        preprocess: DeploymentHandle[Any],
        generate: DeploymentHandle[Any],
        items: SharedItems,
        metrics: IngressMetrics,
        uploads: SharedUploads,
        turns: Turns,
        on_reply: Callable[[str], None],
        *,
        model: str = "",
        chooses_by_prefix: bool = False,
    ) -> None:
        """`generate`: the handle of the deployment. `on_reply`: see StageCalls. `model`: see `ItemOrder`."""
        self.media = MediaItems(config, items, metrics, uploads, on_reply, model=model)
        self.receiver = PieceReceiver(turns)
        self.calls = StageCalls(metrics.items_recomputed, on_reply)
        self.generate = generate.generate
        self.generate_by_grpc = by_grpc(generate).generate
        self.chooses_by_prefix = chooses_by_prefix
        self._preprocess = preprocess

    async def open(self) -> None:
        """Prepares for requests. Call this before the first."""
        await self.receiver.open()

    async def close(self) -> None:
        await self.receiver.close()
        await self.media.close()

    def request(self, wanted: PipelineRequest, processor: ProcessorIdentity) -> Request:
        return Request(self, wanted, processor)

    async def rendered(
        self,
        wanted: PipelineRequest,
        mm_hashes: Sequence[str],
        infos: Sequence[ItemInfo],
        on_pending: Callable[[ObjectRef], None] = lambda ref: None,
    ) -> ProcessedPrompt:
        """Returns the prompt from Preprocess. `on_pending` gets a reference to it once the call is sent. Raises
        CallFailedError."""
        given = wanted.prompt, list(mm_hashes), wanted.truncation, wanted.context, list(infos)
        with call_of("preprocess"):
            _, prompt = await results_of(self._preprocess.render.remote(*given), on_pending)
        assert isinstance(prompt, ProcessedPrompt)
        wanted.trace.times.append(prompt.render_time("Preprocess"))
        wanted.trace.prompt_token_ids = prompt.prompt_token_ids
        self.calls.on_reply("preprocess")
        return prompt

    async def render(self, wanted: PipelineRequest, processor: ProcessorIdentity) -> tuple[ProcessedPrompt, list[str]]:
        """Returns the engine's input for the request, and each item's modality, without encoding anything."""
        items = await self.media.load(wanted, processor)
        infos = await all_or_none([self.media.processed_of(wanted, one) for one in items])
        mm_hashes = [item.mm_hash for item in items]
        prompt = await self.calls.send("preprocess", lambda: self.rendered(wanted, mm_hashes, infos))
        return prompt, prompt.placed([info.modality for info in infos])

    async def tokenize(self, prompt: ChatPrompt | TextPrompt, *, add_special_tokens: bool) -> list[int]:
        tokenize = self._preprocess.tokenize
        ids: list[int] = await self.calls.send("preprocess", lambda: tokenize.remote(prompt, add_special_tokens))
        return ids

    async def opened(
        self, prompt: Prompt, media: Sequence[MediaSource], cache_salt: str, budget: PageBudget
    ) -> tuple[Prompt, list[MediaSource]]:
        """Returns the prompt and its media with the pages of documents in their places. Raises InvalidRequestError."""
        self.media.check_number(media)
        return await with_pages(prompt, media, partial(self._pages_of, cache_salt, budget))

    async def _pages_of(self, cache_salt: str, budget: PageBudget, source: MediaSource) -> list[bytes]:
        content, pages_of = await self.media.read(source, cache_salt), self._preprocess.pages.remote
        if source.data is None:
            budget.on_fetched(len(content))
        try:
            pages: list[bytes] = await self.calls.send("preprocess", lambda: pages_of(content, budget.num_left))
        except InvalidRequestError as error:
            raise error.for_field(source.field) from error
        budget.num_left -= len(pages)
        return pages

    async def detokenize(self, token_ids: list[int]) -> str:
        text: str = await self.calls.send("preprocess", lambda: self._preprocess.detokenize.remote(token_ids))
        return text
