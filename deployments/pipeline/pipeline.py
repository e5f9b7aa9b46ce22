"""The stages of one model behind the endpoint."""

from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from raylens.deployments.config import MediaConfig
from raylens.deployments.item_store.shared_items import SharedItems, SharedUploads
from raylens.deployments.metrics.definitions import IngressMetrics
from raylens.deployments.pipeline.media_items import MediaItems, all_or_none
from raylens.deployments.pipeline.piece_receiver import PieceReceiver
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.pipeline.request import ModelStages, Request
from raylens.deployments.pipeline.turns import Turns
from raylens.deployments.ray_internals.handles import by_grpc
from raylens.deployments.stages.stage_calls import StageCalls
from raylens.preprocess.schema import ChatPrompt, ProcessedPrompt, ProcessorIdentity, TextPrompt


class Pipeline:
    """Sends requests through the stages of one model; see StageCalls for `on_reply`."""

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
        """`model`: see `ItemOrder`. `chooses_by_prefix`: Generate has several replicas, and a prompt goes to the
        replica with its cached prefix."""
        self._media = MediaItems(config, items, metrics, uploads, on_reply, model=model)
        self._receiver = PieceReceiver(turns)
        self._calls = StageCalls(metrics.items_recomputed, on_reply)
        self._preprocess = preprocess
        self._stages = ModelStages(
            preprocess, generate, by_grpc(generate), self._media, self._receiver, self._calls, chooses_by_prefix
        )

    async def open(self) -> None:
        """Prepares for requests. Call this before the first."""
        await self._receiver.open()

    async def close(self) -> None:
        await self._receiver.close()
        await self._media.close()

    def request(self, wanted: PipelineRequest, processor: ProcessorIdentity) -> Request:
        return Request(self._stages, wanted, processor)

    async def render(self, wanted: PipelineRequest, processor: ProcessorIdentity) -> tuple[ProcessedPrompt, list[str]]:
        """Returns the engine's input for the request, and each item's modality, without encoding anything."""
        items = await self._media.load(wanted, processor)
        infos = await all_or_none([self._media.processed_of(wanted, one) for one in items])
        mm_hashes = [item.mm_hash for item in items]
        prompt = await self._calls.send("preprocess", lambda: self._stages.render(wanted, mm_hashes, infos))
        return prompt, prompt.placed([info.modality for info in infos])

    async def tokenize(self, prompt: ChatPrompt | TextPrompt, *, add_special_tokens: bool) -> list[int]:
        tokenize = self._preprocess.tokenize
        ids: list[int] = await self._calls.send("preprocess", lambda: tokenize.remote(prompt, add_special_tokens))
        return ids

    async def detokenize(self, token_ids: list[int]) -> str:
        text: str = await self._calls.send("preprocess", lambda: self._preprocess.detokenize.remote(token_ids))
        return text
