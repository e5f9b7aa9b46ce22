"""The Preprocess deployment: a plain class, wrapped by `deployments/app.py`.

A replica imports the library when it starts, so the controller and the ingress never load torch."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from raylens.deployments.config import AppConfig
from raylens.deployments.metrics.definitions import PreprocessMetrics
from raylens.deployments.replica_start import Replica, start_replica
from raylens.deployments.request_context import RequestContext, in_request
from raylens.deployments.routing.work_scaling import PendingWork
from raylens.deployments.server_log import process_name
from raylens.deployments.stages.free_memory import give_back_free_memory
from raylens.deployments.stages.garbage_collection import skip_startup_objects
from raylens.deployments.stages.item_queue import ItemQueue
from raylens.deployments.stages.niceness import PREPROCESS_NICENESS, give_way_to_answers
from raylens.deployments.stages.object_contents import received
from raylens.deployments.stages.torch_setup import set_up_torch
from raylens.deployments.wire.stage_messages import Heartbeat, ItemJob, ServedModel
from raylens.deployments.wire.tensor_wire import PackedItem, PackedTensor
from raylens.preprocess.schema import (
    ChatPrompt,
    InvalidRequestError,
    ItemInfo,
    ProcessedPrompt,
    Prompt,
    PromptTruncation,
    Stopwatch,
    TextPrompt,
)

if TYPE_CHECKING:
    from raylens.preprocess.processor import MultiModalProcessor
    from raylens.preprocess.prompts import PromptRenderer
    from raylens.preprocess.schema import ItemTensors
    from raylens.preprocess.vision_plugins.interface import PluginParams
    from raylens.preprocess.vision_plugins.registry import VisionPluginChoice

ResultT = TypeVar("ResultT")

PIXELS = "pixels"
_REPORT_SECONDS = 0.5
CALL_PIXELS = 100_000
"""The weight of every call, whatever it brings. The smallest picture takes 0.7 ms, a 4K JPEG 43 ms, some 6 ns a pixel.
Beside a picture this weight is nothing, but thousands of waiting calls are work too."""
_LARGE_PIXELS = 2**24
"""More pixels than photographs have. For an item of so many, giving memory back takes little time beside the rest."""


class Preprocess(Replica):
    """Runs the model's Hugging Face processor. Items and prompts have a thread each, so that a prompt does not wait for
    another request's picture. The event loop answers heartbeats meanwhile."""

    def __init__(self, config: AppConfig) -> None:
        self._spans = start_replica("preprocess", config)
        give_way_to_answers(PREPROCESS_NICENESS)
        set_up_torch(config.preprocess.num_cpus)
        self._processor = load_model_processor(config)
        self._items = ItemQueue(ThreadPoolExecutor(max_workers=1, thread_name_prefix="items"))
        self._prompt_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._pending = PendingWork(PIXELS)
        self._metrics = PreprocessMetrics()
        self._reporter = asyncio.get_running_loop().create_task(self._report_forever())
        skip_startup_objects()

    async def process_item(self, job: ItemJob) -> AsyncGenerator[PackedItem | PackedTensor | ItemInfo]:
        """Yields the item's tensors, or its embeddings where the client has sent embeddings, and its ItemInfo."""
        watch = Stopwatch()
        # The block ends before the first yield: a generator that is dropped at one would go on counting until it is
        # collected.
        status = "error"
        try:
            with self._pending.call(CALL_PIXELS + job.num_pixels), in_request(job.context):
                content = await received(job.content)
                info, tensors = await self._items.run(
                    CALL_PIXELS + job.num_pixels, lambda: self._process(job, content, watch)
                )
            status = "ok"
        finally:
            self._metrics.items_total.inc(modality=job.modality, status=status)
        packed = {name: PackedTensor.pack(tensor) for name, tensor in tensors.items()}
        yield packed["embeddings"] if info.is_encoded else packed
        yield info
        self._spans.record(job.context, info.times)  # nobody waits for it

    def _process(self, job: ItemJob, content: bytes, watch: Stopwatch) -> "tuple[ItemInfo, ItemTensors]":
        """`watch` has been running since the job arrived."""
        queued, items = watch.read("processor_queue"), self._processor.items
        work = items.accept if job.is_precomputed else items.process
        try:
            info, tensors = work(job.modality, content, num_in_prompt=job.num_in_prompt, options=job.options)
        finally:
            if job.num_pixels >= _LARGE_PIXELS and not job.is_precomputed:
                give_back_free_memory()
        times = tuple(replace(one, place=process_name()) for one in (queued, *info.times))
        return replace(info, times=times), tensors

    async def render(
        self,
        prompt: Prompt,
        mm_hashes: list[str],
        truncation: PromptTruncation | None,
        context: RequestContext,
        *items: ItemInfo,
    ) -> AsyncGenerator[ProcessedPrompt]:
        """Yields what `PromptRenderer.render` returns. Each item is an argument of its own, so that the caller may give
        a reference to it, and Ray makes the call when all of them are there."""
        prompts = self._processor.prompts
        with in_request(context):
            made = await self._on_prompt_thread(lambda: rendered(prompts, prompt, items, mm_hashes, truncation))
        yield made
        self._spans.record(context, [made.render_time(process_name())])

    async def tokenize(self, prompt: ChatPrompt | TextPrompt, add_special_tokens: bool) -> list[int]:
        prompts = self._processor.prompts
        return await self._on_prompt_thread(lambda: prompts.tokenize(prompt, add_special_tokens=add_special_tokens))

    async def detokenize(self, token_ids: list[int]) -> str:
        return await self._on_prompt_thread(lambda: self._processor.prompts.detokenize(token_ids))

    async def _on_prompt_thread(self, work: Callable[[], ResultT]) -> ResultT:
        with self._pending.call(CALL_PIXELS):
            return await asyncio.get_running_loop().run_in_executor(self._prompt_thread, work)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns what `deployments/routing/work_scaling.py` scales by."""
        return self._pending.stats()

    async def heartbeat(self) -> Heartbeat:
        processor = self._processor
        tool_calls = processor.prompts.tool_calls
        served = ServedModel(processor.identity, processor.max_model_len, processor.items.modalities, tool_calls)
        return Heartbeat(served=served)

    async def _report_forever(self) -> None:
        while True:
            self._metrics.pending_pixels.set(self._pending.amount)
            self._metrics.waiting_items.set(len(self._items))
            await asyncio.sleep(_REPORT_SECONDS)


def rendered(
    prompts: "PromptRenderer",
    prompt: Prompt,
    items: Sequence[ItemInfo],
    mm_hashes: Sequence[str],
    truncation: PromptTruncation | None,
) -> ProcessedPrompt:
    """Returns what `PromptRenderer.render` returns. Raises InvalidRequestError for a prompt without a token, too."""
    processed = prompts.render(prompt, items, mm_hashes, truncation=truncation)
    if not processed.prompt_token_ids:
        raise InvalidRequestError("the prompt has no token", field="prompt", code="empty_prompt")
    return processed


def load_model_processor(config: AppConfig) -> "MultiModalProcessor":
    """Returns the processor of the model that is served. Call `set_up_torch` before."""
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
        )
    )


def plugin_choice(config: AppConfig) -> "VisionPluginChoice | None":
    """Returns the vision plug-in of a text model in the libraries' form."""
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
