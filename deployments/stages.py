"""The three libraries as Ray Serve deployments: plain classes, wrapped by `deployments.app`.

A stage that makes tensors answers with two objects: first what is known of the item, then its tensors (and an empty
third that ends them, see `stage_calls`). The caller reads the first and passes a reference to the second on, unread.
Both are owned by the caller, so they outlive the replica that made them.

The libraries are imported where a replica starts: the controller and the ingress never load torch.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deployments.config import AppConfig
from deployments.engine_loop import EngineLoop
from deployments.generate_ranks import RankActors
from deployments.metrics import EncodeMetrics, GenerateMetrics, PreprocessMetrics
from deployments.pixel_scaling import PendingWork
from deployments.tensor_wire import PackedItem, PackedTensor
from deployments.torch_setup import set_up_torch
from llm.sampling_params import SamplingParams
from preprocess.pixel_count import work_pixels
from preprocess.schema import ItemInfo, ProcessedPrompt, ProcessorIdentity, Prompt

if TYPE_CHECKING:
    from encoder.schema import EncodeOutput
    from llm.outputs import EngineStats, RequestOutput
    from preprocess.schema import ItemTensors


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A stage's sign of life: seconds since its engine last moved, and the processor's identity if it has one."""

    age_s: float = 0.0
    processor: ProcessorIdentity | None = None


@dataclass(frozen=True, slots=True)
class ItemJob:
    """One item for the processor. `num_in_prompt`: items of its modality in the prompt; `options`: the client's
    settings; `is_precomputed`: `content` is tensors, see `preprocess.precomputed`."""

    modality: str
    content: bytes
    num_in_prompt: int
    options: dict[str, Any]
    is_precomputed: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """What is known of an item's embeddings besides the tensor. Times in seconds."""

    num_bytes: int
    transfer_seconds: float
    queue_seconds: float
    encode_seconds: float


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A piece of an answer. `seconds` holds the stage times that became known with it, by stage name."""

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str | None
    seconds: dict[str, float]


class Preprocess:
    """Runs the model's Hugging Face processor. Items and prompts are worked on in a thread each, so that a prompt
    is never rendered only after somebody else's picture, and heartbeats are answered meanwhile."""

    def __init__(self, config: AppConfig) -> None:
        set_up_torch(config.preprocess.num_cpus)
        import torch

        from preprocess.processor import MultiModalProcessor, ProcessorConfig

        self._limits = config.media.limits()
        self._processor = MultiModalProcessor(
            ProcessorConfig(
                model=config.model,
                revision=config.revision,
                image_backend=config.preprocess.image_backend,
                jpeg_draft=config.preprocess.jpeg_draft,
                dtype=getattr(torch, config.dtype_name(config.encode.num_gpus)),
                max_model_len=config.max_model_len,
                limits=self._limits,
            )
        )
        # On Linux niceness belongs to a thread; those that torch starts from this one inherit it.
        self._item_thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="items", initializer=os.nice, initargs=(config.preprocess.niceness,)
        )
        self._prompt_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._pending = PendingWork()
        self._metrics = PreprocessMetrics()

    async def process_item(self, job: ItemJob) -> AsyncGenerator[ItemInfo | PackedItem | PackedTensor | None]:
        """Yields the item's ItemInfo, its tensors (those that it has been encoded to already, if so), and None as the
        proof that these are whole."""
        # Tensors are taken as they are, without a pixel to decode. The block ends before the first yield: a generator
        # that is dropped at one would go on counting until it is collected.
        num_pixels = 0 if job.is_precomputed else work_pixels(job.modality, job.content, self._limits)
        with self._pending.call(num_pixels):
            info, tensors = await asyncio.get_running_loop().run_in_executor(self._item_thread, self._process, job)
        yield info
        packed = {name: PackedTensor.pack(tensor) for name, tensor in tensors.items()}
        yield packed["embeddings"] if info.is_encoded else packed
        yield None

    def _process(self, job: ItemJob) -> "tuple[ItemInfo, ItemTensors]":
        items = self._processor.items
        number, options = job.num_in_prompt, job.options
        if job.is_precomputed:
            return items.accept(job.modality, job.content, num_in_prompt=number, options=options)
        return items.process(job.modality, [job.content], num_in_prompt=number, options=options)[0]

    async def render(self, prompt: Prompt, items: list[ItemInfo], hashes: list[str]) -> ProcessedPrompt:
        with self._pending.call():
            return await asyncio.get_running_loop().run_in_executor(
                self._prompt_thread, self._processor.prompts.render, prompt, items, hashes
            )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `deployments.pixel_scaling` scales by; Serve asks about twice a second."""
        self._metrics.pending_pixels.set(self._pending.num_pixels)
        return self._pending.stats()

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat(processor=self._processor.identity)


class Encode:
    """Batches waiting items through the vision half."""

    def __init__(self, config: AppConfig) -> None:
        set_up_torch(config.encode.num_cpus)
        import torch

        from encoder.config import EncoderConfig, PartConfig
        from encoder.engine import EncoderEngine

        part = PartConfig(
            dtype=getattr(torch, config.dtype_name(config.encode.num_gpus)),
            device="cuda" if config.encode.num_gpus else "cpu",
        )
        encoder_config = EncoderConfig(config.model, config.revision, tower=part, projector=part)
        engine = EncoderEngine(encoder_config, max_batch_size=config.encode.max_batch_size)
        self._engine = engine
        self._loop: EngineLoop[EncodeOutput] = EngineLoop(
            engine, name="encoder-engine", step_timeout_s=config.encode.step_timeout_s
        )
        self._metrics = EncodeMetrics()

    async def encode(
        self, request_id: str, item: PackedItem, sent_at: float
    ) -> AsyncGenerator[EmbeddingInfo | PackedTensor | None]:
        """Yields an EmbeddingInfo, the embeddings (num_tokens, hidden_size), and None. `sent_at` is wall time."""
        transfer_seconds = max(0.0, time.time() - sent_at)
        tensors = {name: tensor.unpack() for name, tensor in item.items()}
        async with aclosing(
            self._loop.stream(request_id, lambda engine_id: self._engine.add_request(engine_id, tensors))
        ) as outputs:
            (output,) = await anext(outputs)
        status = "ok" if output.error is None else "error"
        self._metrics.items_total.inc(tags={"modality": "image", "status": status})
        if output.error is not None:
            raise output.error
        assert output.embeddings is not None
        self._metrics.batch_size.observe(output.batch_size)
        yield EmbeddingInfo(output.embeddings.nbytes, transfer_seconds, output.queue_seconds, output.encode_seconds)
        yield PackedTensor.pack(output.embeddings)
        yield None

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat(self._loop.heartbeat_age)

    def check_health(self) -> None:
        self._loop.check_health()


class Generate:
    """Stitches embeddings into the prompt and decodes; rank 0 where the model is divided among several."""

    _ranks: RankActors | None = None  # also of one that could not load

    def __init__(self, config: AppConfig) -> None:
        settings = config.generate
        # First: their processes start while this one imports.
        ranks = RankActors(settings) if settings.tensor_parallel_size > 1 else None
        set_up_torch(settings.num_cpus)
        import torch

        from llm.config import EngineConfig
        from llm.engine import LLMEngine

        engine_config = EngineConfig(
            model=config.model,
            revision=config.revision,
            dtype=getattr(torch, config.dtype_name(settings.num_gpus)),
            device="cuda" if settings.num_gpus else "cpu",
            block_size=settings.block_size,
            kv_cache_bytes=settings.kv_cache_bytes,
            memory_fraction=settings.memory_fraction,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            prefix_caching=settings.prefix_caching,
            quantization=settings.quantization,
            kv_cache_dtype=None if settings.kv_cache_dtype == "auto" else getattr(torch, settings.kv_cache_dtype),
        )
        engine = LLMEngine(engine_config) if ranks is None else ranks.load_engine(engine_config)
        self._engine = engine
        self._loop: EngineLoop[RequestOutput] = EngineLoop(
            engine, name="llm-engine", step_timeout_s=settings.step_timeout_s
        )
        if ranks is not None:
            ranks.run(on_end=self._loop.fail)
        self._ranks = ranks
        self._metrics = GenerateMetrics()
        self._num_preemptions = 0
        self._reporter = asyncio.get_running_loop().create_task(self._report_forever())

    def __del__(self) -> None:
        """Called by Ray Serve when it stops a replica that is well, after its last request."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None and self._loop.close():
            ranks.stop()

    async def generate(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        params: SamplingParams,
        cache_salt: str,
        sent_at: float,
        *items: PackedTensor,
    ) -> AsyncGenerator[GeneratedText]:
        """Yields the answer piece by piece: tokens that are ready together go together, the first one at once.

        Requests of different `cache_salt` share no prefix. `sent_at` is wall time.
        """
        transfer_seconds = max(0.0, time.time() - sent_at)
        embeddings = [item.unpack() for item in items]
        if params.structured_output is not None:
            # Up to a second, in which nobody's stream may stand still; then the engine finds it compiled.
            await asyncio.to_thread(self._engine.grammar_compiler.compile, params.structured_output)
        is_first = True
        async with aclosing(
            self._loop.stream(
                request_id,
                lambda engine_id: self._engine.add_request(
                    engine_id, prompt, embeddings, params, cache_salt=cache_salt
                ),
            )
        ) as batches:
            async for outputs in batches:
                piece = _merge(outputs)
                if is_first:
                    piece.seconds["transfer_embeddings"] = transfer_seconds
                    is_first = False
                yield piece
                if piece.finish_reason is not None:
                    return

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat(self._loop.heartbeat_age)

    def check_health(self) -> None:
        self._loop.check_health()

    async def _report_forever(self) -> None:
        while True:
            self._report(self._engine.stats)
            await asyncio.sleep(1.0)

    def _report(self, stats: "EngineStats") -> None:
        self._metrics.num_running.set(stats.num_running)
        self._metrics.num_waiting.set(stats.num_waiting)
        self._metrics.kv_cache_usage.set(stats.kv_cache_usage)
        if stats.num_preemptions > self._num_preemptions:
            self._metrics.num_preemptions.inc(stats.num_preemptions - self._num_preemptions)
            self._num_preemptions = stats.num_preemptions


def _merge(outputs: "list[RequestOutput]") -> GeneratedText:
    """One piece out of the outputs of several steps; stage times go out with the token that ends the stage."""
    last = outputs[-1]
    times = last.times
    seconds: dict[str, float] = {}
    token_ids = [token_id for output in outputs for token_id in output.token_ids]
    first_index = last.num_output_tokens - len(token_ids)
    if first_index == 0 and times.first_token is not None and times.first_scheduled is not None:
        seconds["llm_queue"] = times.first_scheduled - times.arrival
        seconds["prefill"] = times.first_token - times.first_scheduled
    if first_index <= 1 < last.num_output_tokens and times.first_token is not None and times.second_token is not None:
        seconds["first_decode"] = times.second_token - times.first_token
    return GeneratedText(
        text="".join(output.text for output in outputs),
        token_ids=token_ids,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        num_output_tokens=last.num_output_tokens,
        # A plain string: the enumeration's module imports torch, which the ingress does without.
        finish_reason=None if last.finish_reason is None else last.finish_reason.value,
        seconds=seconds,
    )
