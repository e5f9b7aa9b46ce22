"""The Generate deployment: a plain class, wrapped by `deployments/app.py`."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from raylens.deployments.config import AppConfig
from raylens.deployments.metrics.definitions import GenerateMetrics
from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.replica_start import Replica, start_replica
from raylens.deployments.request_context import RequestContext, in_request
from raylens.deployments.routing.work_scaling import CALLS
from raylens.deployments.server_log import process_name
from raylens.deployments.stages.adapter_folder import AdapterFolder, adapter_not_found
from raylens.deployments.stages.encode_stage import Encode
from raylens.deployments.stages.engine_loop import EngineLoop
from raylens.deployments.stages.generate_job import GenerateJob
from raylens.deployments.stages.generate_ranks import RankActors
from raylens.deployments.stages.hand_over import HandOver, received_prompt
from raylens.deployments.stages.memory_turn import memory_turn
from raylens.deployments.stages.pieces import AnswerSender, PieceMaker
from raylens.deployments.stages.preprocess_stage import load_model_processor, rendered
from raylens.deployments.stages.process_setup import end_startup, kernels_in_use, set_up_torch
from raylens.deployments.stages.thoughts import ThoughtSplitter
from raylens.deployments.wire.piece_connection import PieceConnections
from raylens.deployments.wire.stage_messages import EmbeddingInfo, Heartbeat, UnrenderedPrompt
from raylens.deployments.wire.tensor_wire import PackedItem, PackedTensor
from raylens.llm.config import EngineConfig
from raylens.llm.lora.request import LoraRequest
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ProcessedPrompt, StageTime

if TYPE_CHECKING:
    from raylens.llm.engine import LLMEngine
    from raylens.llm.outputs import RequestOutput
    from raylens.preprocess.items import ItemProcessor


logger = logging.getLogger(f"ray.serve.{__name__}")

PROMPT_TOKENS = "prompt_tokens"
USAGE = "usage"


class Generate(Replica):
    """Inserts embeddings into the prompt and decodes. With tensor parallelism, the replica is rank 0. Unless
    `encode.placement` is `separate`, the replica also encodes, on a separate thread."""

    _ranks: RankActors | None = None  # also set if loading failed

    def __init__(self, config: AppConfig) -> None:
        self._spans = start_replica("generate", config)
        settings = config.generate
        # First, so the ranks' processes start while this one imports.
        ranks = RankActors(settings) if settings.tensor_parallel_size > 1 else None
        set_up_torch(settings.num_cpus)
        with memory_turn(config.generate_device):
            engine = self._load(config, ranks)
        self._prompt_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._engine = engine
        Thread(target=engine.populate_cache, name="populate-cache", daemon=True).start()
        timeout_s = config.step_timeout_s
        self._loop: EngineLoop[RequestOutput] = EngineLoop(engine, name="llm-engine", step_timeout_s=timeout_s)
        if ranks is not None:
            ranks.run(on_end=self._loop.fail)
        self._ranks = ranks
        folder = settings.adapters_folder
        self._adapters = None if folder is None else AdapterFolder(folder, engine.check_adapter)
        engine.call_when_adapter_read(self._loop.wake)
        self._connections = PieceConnections()
        self._metrics = GenerateMetrics()
        self._details = kernels_in_use(config.generate_device) | self._family
        self._report_regularly(lambda: self._metrics.report(engine.stats))
        end_startup()

    def _load(self, config: AppConfig, ranks: RankActors | None) -> "LLMEngine":
        self._family = _checked_family(config)
        # The encoder loads first, because the KV cache takes the remaining memory. Its graphs may take as much memory
        # as its activations.
        self._encoder = None if config.encode.placement == "separate" else Encode(config, spans=self._spans)
        reserved_bytes = 0 if self._encoder is None else 2 * config.encode.activation_bytes
        from raylens.llm.engine import LLMEngine

        processor = load_model_processor(config)
        self._prompts = processor.prompts
        engine_config = EngineConfig(
            model=config.model,
            revision=config.revision,
            dtype=config.dtype_name(config.generate_device),
            exact=config.is_exact(),
            device=config.generate_device,
            gpu_share=config.generate.gpu_share,
            reserved_bytes=reserved_bytes,
            num_threads=config.num_threads,
            max_model_len=config.max_model_len,
            allow_longer_context=config.allow_longer_context,
            largest_item_tokens=_largest_picture_tokens(processor.items),
            pooling=processor.pooling,
            **asdict(config.generate.engine),
        )
        self._max_num_seqs = engine_config.max_num_seqs
        return LLMEngine(engine_config) if ranks is None else ranks.load_engine(engine_config)

    def __del__(self) -> None:
        super().__del__()
        ranks, self._ranks = self._ranks, None
        if ranks is not None and self._loop.close():
            ranks.stop()

    async def generate(self, job: GenerateJob) -> None:
        """Renders an unrendered prompt and sends the answers to `job.address`, the first token at once. Returns when
        all pieces are sent. Computes the prompt up to the first pending item until its embeddings arrive.

        Raises PromptLostError, EmbeddingsLostError, LoraError for a broken adapter, InvalidRequestError for a removed
        one."""
        params = job.params
        with in_request(job.context), self._spans.span("generate", job.context) as span:
            lora = None if job.adapter is None else await self._find_adapter(job.adapter)
            connection = await self._connections.to(job.address.ingress)
            prompt, times = await self._rendered(job.prompt)
            items = prompt.placed(job.items)
            hand_over = HandOver(
                items, prompt.rendered_at, self._metrics.remote_bytes.inc, self._engine.stage_embeddings
            )
            embeddings = await hand_over.ready()
            sender = AnswerSender(
                connection,
                job.address.number,
                params.n,
                await self._piece_maker(prompt, params),
                lambda: [*times, hand_over.transfer] if items else times,
                partial(self._spans.record, span.context),
            )
            arrival = time.perf_counter()
            await self._loop.run(
                job.request_id,
                lambda id_: self._engine.add_request(
                    id_,
                    prompt,
                    embeddings,
                    params,
                    cache_salt=job.cache_salt,
                    prompt_salt=job.prompt_salt,
                    priority=job.priority,
                    lora=lora,
                    arrival=arrival,
                    pools=job.pools,
                ),
                sender.receive,
                hand_over.pending(self._engine.set_embeddings),
            )

    async def _piece_maker(self, prompt: ProcessedPrompt, params: SamplingParams) -> PieceMaker:
        """Returns the request's PieceMaker, once its grammar, spellings and token bytes are ready."""
        if params.structured_output is not None:
            # Takes up to seconds. On a thread it blocks no stream, and the engine finds the result cached.
            await asyncio.to_thread(self._engine.grammar_compiler.compile, params.structured_output)
        if params.bad_words:
            await asyncio.to_thread(self._spell, params.bad_words)
        pieces_of = PieceMaker(
            self._engine.byte_tokenizer,
            lambda: self._engine.make_detokenizer(params, prompt),
            None if params.prompt_logprobs is None else prompt.prompt_token_ids[0],
            includes_stop=params.include_stop_str_in_output,
            make_splitter=None
            if prompt.thoughts is None
            else partial(ThoughtSplitter, prompt.thoughts, is_open=prompt.is_thinking),
        )
        names_tokens = params.logprobs is not None or params.prompt_logprobs is not None
        if names_tokens or prompt.thoughts is not None:
            await asyncio.to_thread(pieces_of.prepare)
        return pieces_of

    async def _rendered(
        self, given: UnrenderedPrompt | ProcessedPrompt | PackedReference
    ) -> tuple[ProcessedPrompt, list[StageTime]]:
        """Returns the prompt, and the times of rendering it here. Raises PromptLostError, and InvalidRequestError, see
        `rendered`."""
        if isinstance(given, UnrenderedPrompt):
            parts = given.prompt, given.items, given.mm_hashes, given.truncation
            loop = asyncio.get_running_loop()
            prompt = await loop.run_in_executor(self._prompt_thread, rendered, self._prompts, *parts)
            return prompt, [prompt.render_time(process_name())]
        return (given if isinstance(given, ProcessedPrompt) else await received_prompt(given)), []

    async def _find_adapter(self, name: str) -> LoraRequest:
        if self._adapters is None:
            raise adapter_not_found(name)
        return await asyncio.to_thread(self._adapters.find, name)

    async def _seen_adapters(self) -> dict[str, str | None] | None:
        if self._adapters is None:
            return None
        try:
            return await asyncio.to_thread(self._adapters.look)
        except OSError as error:  # file system temporarily unavailable
            logger.warning("generate.adapters_folder cannot be read: %s", error)
            return None

    def _spell(self, words: Sequence[str]) -> None:
        """Caches the words' spellings, so the engine's thread does not wait for them."""
        for word in words:
            self._engine.byte_tokenizer.spellings(word)

    async def encode(
        self, request_id: str, modality: str, item: PackedItem, sent_at: float, context: RequestContext
    ) -> tuple[PackedTensor, EmbeddingInfo]:
        """See `Encode.encode`. Not called if `encode.placement` is `separate`."""
        assert self._encoder is not None
        embeddings, info = await self._encoder.encode(request_id, modality, item, sent_at, context)
        return embeddings, replace(info, num_decoding=self._engine.stats.num_running)

    async def heartbeat(self) -> Heartbeat:
        encoder = Heartbeat() if self._encoder is None else await self._encoder.heartbeat()
        age_s = max(self._loop.heartbeat_age, encoder.age_s)
        return Heartbeat(age_s, details=self._details, adapters=await self._seen_adapters())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load figures for `deployments/routing/work_scaling.py`."""
        stats = self._engine.stats
        encoder = {} if self._encoder is None else await self._encoder.record_autoscaling_stats()
        num_sequences = stats.num_running + stats.num_waiting
        usage = max(stats.kv_cache_usage, num_sequences / self._max_num_seqs)
        return encoder | {PROMPT_TOKENS: stats.num_lacking_tokens, USAGE: usage, CALLS: self._loop.num_requests}

    def check_health(self) -> None:
        self._loop.check_health()
        if self._encoder is not None:
            self._encoder.check_health()


def _checked_family(config: AppConfig) -> dict[str, str]:
    """Returns an entry for `/health` of a model that no family declares. Raises SelfTestError for one that the stages
    would compute wrongly."""
    from raylens.modeling.families import is_found
    from raylens.modeling.model_configs import load_model_config

    is_plugin = config.vision_plugin.name is not None
    if is_plugin or not is_found(load_model_config(config.model, config.revision).model_type):
        return {}
    from raylens.deployments.stages.found_model_check import check_found_model

    logger.info("no family declares this model: its halves are compared with the model before the first request")
    told = check_found_model(config.model, config.revision)
    logger.info("%s", told)
    return {"family": told}


def _largest_picture_tokens(items: "ItemProcessor") -> int:
    """Returns the prompt positions of the model's largest image, 0 for a model that only hears."""
    if "image" not in items.modalities:
        return 0
    options = items.rules("image").largest_options
    return len(items.expansion_for_size("image", items.largest_size("image"), options=options).token_ids)
