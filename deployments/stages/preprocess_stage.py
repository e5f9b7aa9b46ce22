"""The Preprocess deployment: a plain class, wrapped by `deployments/app.py`.

Only a replica imports the library, so the controller and the ingress never load torch."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from raylens.deployments.config import AppConfig, ChatConfig
from raylens.deployments.metrics.definitions import PreprocessMetrics
from raylens.deployments.replica_start import Replica, start_replica
from raylens.deployments.request_context import RequestContext, in_request
from raylens.deployments.routing.work_scaling import PendingWork
from raylens.deployments.server_log import process_name
from raylens.deployments.stages import process_setup
from raylens.deployments.stages.item_queue import ItemQueue
from raylens.deployments.stages.object_contents import received
from raylens.deployments.wire.stage_messages import Heartbeat, ItemJob, ServedModel
from raylens.deployments.wire.tensor_wire import PackedItem, PackedTensor
from raylens.modeling.pooling import PoolingSettings
from raylens.preprocess import schema

if TYPE_CHECKING:
    from raylens.preprocess.chat_template import ChatFormats
    from raylens.preprocess.processor import MultiModalProcessor
    from raylens.preprocess.prompts import PromptRenderer
    from raylens.preprocess.vision_plugins.interface import PluginParams
    from raylens.preprocess.vision_plugins.registry import VisionPluginChoice

ResultT = TypeVar("ResultT")

PIXELS = "pixels"
CALL_PIXELS = 100_000
"""The weight of a call, so that small ones count. A 4K JPEG takes 43 ms (6 ns a pixel), the smallest image 0.7 ms."""
_PAGES_PIXELS = 10_000_000
"""The weight of a document."""
_LARGE_PIXELS = 2**24
"""Above this size (no photo is larger), returning freed memory to the system is cheap next to the processing."""


class Preprocess(Replica):
    """Runs the model's processor. Prompts have their own thread, so they never wait for another request's image."""

    def __init__(self, config: AppConfig) -> None:
        self._spans = start_replica("preprocess", config)
        process_setup.give_way_to_answers(process_setup.PREPROCESS_NICENESS)
        process_setup.set_up_torch(config.preprocess.num_cpus)
        self._processor = load_model_processor(config)
        self._items = ItemQueue(ThreadPoolExecutor(max_workers=1, thread_name_prefix="items"))
        self._prompt_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._document_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="documents")
        self._pending = PendingWork(PIXELS)
        self._metrics = PreprocessMetrics()
        self._report_regularly(self._report)
        process_setup.end_startup()

    async def process_item(self, job: ItemJob) -> tuple[PackedItem | PackedTensor, schema.ItemInfo]:
        """Returns the item's tensors, or the embeddings that the client sent, and the ItemInfo."""
        watch, status = schema.Stopwatch(), "error"
        try:
            with self._pending.call(CALL_PIXELS + job.num_pixels), in_request(job.context):
                content = await received(job.content)
                work = partial(self._process, job, content, watch)
                info, tensors = await self._items.run(CALL_PIXELS + job.num_pixels, work)
            status = "ok"
        finally:
            self._metrics.items_total.inc(modality=job.modality, status=status)
        packed = {name: PackedTensor.pack(tensor) for name, tensor in tensors.items()}
        self._spans.record(job.context, info.times)
        return packed["embeddings"] if info.is_encoded else packed, info

    def _process(
        self, job: ItemJob, content: bytes, watch: schema.Stopwatch
    ) -> tuple[schema.ItemInfo, schema.ItemTensors]:
        """`watch` started when the job arrived."""
        queued, items = watch.read("processor_queue"), self._processor.items
        work = items.accept if job.is_precomputed else items.process
        try:
            info, tensors = work(job.modality, content, num_in_prompt=job.num_in_prompt, options=job.options)
        finally:
            if job.num_pixels >= _LARGE_PIXELS and not job.is_precomputed:
                process_setup.give_back_free_memory()
        times = tuple(replace(one, place=process_name()) for one in (queued, *info.times))
        return replace(info, times=times), tensors

    async def render(
        self,
        prompt: schema.Prompt,
        mm_hashes: list[str],
        truncation: schema.PromptTruncation | None,
        context: RequestContext,
        items: Sequence[schema.ItemInfo],
    ) -> schema.ProcessedPrompt:
        """Returns the result of `PromptRenderer.render`."""
        prompts = self._processor.prompts
        with in_request(context):
            made = await self._on_prompt_thread(lambda: rendered(prompts, prompt, items, mm_hashes, truncation))
        self._spans.record(context, [made.render_time(process_name())])
        return made

    async def tokenize(self, prompt: schema.ChatPrompt | schema.TextPrompt, add_special_tokens: bool) -> list[int]:
        prompts = self._processor.prompts
        return await self._on_prompt_thread(lambda: prompts.tokenize(prompt, add_special_tokens=add_special_tokens))

    async def detokenize(self, token_ids: list[int]) -> str:
        return await self._on_prompt_thread(lambda: self._processor.prompts.detokenize(token_ids))

    async def pages(self, content: bytes, max_pages: int) -> list[bytes]:
        """Returns each page of a PDF as a picture, see `pages_of`."""
        from raylens.preprocess.document_pages import pages_of

        with self._pending.call(_PAGES_PIXELS):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._document_thread, pages_of, content, max_pages)

    async def _on_prompt_thread(self, work: Callable[[], ResultT]) -> ResultT:
        with self._pending.call(CALL_PIXELS):
            return await asyncio.get_running_loop().run_in_executor(self._prompt_thread, work)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._pending.stats()

    async def heartbeat(self) -> Heartbeat:
        own = self._processor
        facts = own.identity, own.max_model_len, own.items.modalities, own.prompts.tool_calls, own.pooling
        return Heartbeat(served=ServedModel(*facts))

    def _report(self) -> None:
        self._metrics.pending_pixels.set(self._pending.amount)
        self._metrics.waiting_items.set(len(self._items))


def rendered(
    prompts: "PromptRenderer",
    prompt: schema.Prompt,
    items: Sequence[schema.ItemInfo],
    mm_hashes: Sequence[str],
    truncation: schema.PromptTruncation | None,
) -> schema.ProcessedPrompt:
    """Like `PromptRenderer.render`, but also raises InvalidRequestError for a prompt without tokens."""
    processed = prompts.render(prompt, items, mm_hashes, truncation=truncation)
    if not processed.prompt_token_ids:
        raise schema.InvalidRequestError("the prompt has no token", field="prompt", code="empty_prompt")
    return processed


def load_model_processor(config: AppConfig) -> "MultiModalProcessor":
    """Returns the served model's processor. Call `set_up_torch` first."""
    import torch

    from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig

    return MultiModalProcessor(
        ProcessorConfig(
            model=config.model,
            revision=config.revision,
            image_backend=config.preprocess.image_backend,
            video_frames=config.preprocess.video_frames,
            dtype=getattr(torch, config.part_dtype_name(config.encode.tower)),
            embedding_dtype=getattr(torch, config.part_dtype_name(config.encode.projector)),
            max_model_len=config.max_model_len,
            limits=config.media.limits,
            vision_plugin=plugin_choice(config),
            chat=_chat_formats(config.chat),
            pooling=PoolingSettings(config.pooling.type, config.pooling.normalize, config.pooling.score_tokens),
        )
    )


def _chat_formats(chat: ChatConfig) -> "ChatFormats":
    """Returns the settings in the library's form."""
    from raylens.preprocess.chat_template import ChatFormats

    template = None if chat.template is None else Path(chat.template).read_text()
    return ChatFormats(template, chat.tool_call_parser, chat.reasoning_parser, chat.trust_request_template)


def plugin_choice(config: AppConfig) -> "VisionPluginChoice | None":
    """Returns the configured vision plug-in in the libraries' form."""
    from raylens.preprocess.vision_plugins.registry import VisionPluginChoice

    settings, tower, projector = config.vision_plugin, config.encode.tower, config.encode.projector
    if settings.name is None:
        return None
    params: PluginParams = {
        **settings.options,
        "vision_device": config.part_device(tower),
        "vision_bits": config.part_bits(tower),
        "projector_device": config.part_device(projector),
        "projector_bits": config.part_bits(projector),
    }
    return VisionPluginChoice(None if settings.name == "auto" else settings.name, settings.folder, params)
