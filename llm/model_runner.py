"""Runs the language half over the chunks of one step."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from raylens.cpu_kernels.library import kernel_library
from raylens.cpu_kernels.thread_backoff import ThreadBackoff
from raylens.cpu_kernels.threads import set_num_threads, usable_cores
from raylens.llm.attention import AttentionCall, LayerShape, PagedAttention, block_bytes
from raylens.llm.cache_size import bytes_left_for_cache, shortage_explained, worst_step
from raylens.llm.cache_slots import check_cache_dtype
from raylens.llm.config import EngineConfig
from raylens.llm.cpu.attention import CpuAttention
from raylens.llm.cpu.fused_check import agree
from raylens.llm.cpu.fused_decoder import FusedDecoder, NotPlainError
from raylens.llm.cpu.kernel_attention import KernelAttention, padded_shape
from raylens.llm.cuda.compiled_layers import compile_layers
from raylens.llm.cuda.first_steps import missing_tools_named, run_first_steps
from raylens.llm.forward_pass import ForwardPass
from raylens.llm.layer_probe import cache_shapes, probe_layers
from raylens.llm.loader import load_language_half
from raylens.llm.lora.adapter import LinearShape
from raylens.llm.lora.layers import LoraLayers, linear_shapes
from raylens.llm.prompt_layout import PromptLayout
from raylens.llm.ranks.lockstep import run_on_all_ranks
from raylens.llm.ranks.parallel import ProcessGroup
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.step_input import StepBuilder, StepInput
from raylens.llm.step_output import StepOutput
from raylens.llm.step_threads import StepThreads
from raylens.modeling.attention_backends import turn_off_cudnn_attention
from raylens.modeling.context_length import default_context_length
from raylens.modeling.cuda_graphs import CudaCapture, NotRecordableError
from raylens.modeling.merged_linear import merge_linear_layers
from raylens.modeling.packed_linear import pack_linear_layers
from raylens.modeling.quantized_linear import quantize_linear_layers
from raylens.preprocess.schema import ProcessedPrompt

if TYPE_CHECKING:
    from raylens.llm.cuda.decode_graphs import DecodeGraphs

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 512 * 2**20


class ModelRunner:
    """Holds the weights and the KV cache, and runs chunks of sequences. Requests are the engine's concern."""

    def __init__(self, config: EngineConfig, group: ProcessGroup | None = None) -> None:
        """With a `group` this runner is one rank of several. All ranks but rank 0 run `lockstep.serve_steps`.

        Raises ValueError for an unsupported model or unsupported settings."""
        if config.max_loras > 0 and group is not None:
            raise ValueError("max_loras: a model divided among ranks serves no adapters")
        turn_off_cudnn_attention()
        self._group = group
        self._device = torch.device(config.device)
        if self._device.type == "cuda":
            check_cache_dtype(_cache_dtype(config), self._device)
        is_float32 = config.dtype == "float32" and _cache_dtype(config) is torch.float32
        self._kernels = kernel_library() if self._device.type == "cpu" and is_float32 else None
        self._model, self._family = load_language_half(config, group)
        self._decoder = self._family.find_decoder(self._model)
        lora_shapes = linear_shapes(self._decoder) if config.max_loras > 0 else {}
        if config.quantization == "int8":
            if group is not None:
                raise ValueError("quantization: weights divided among ranks cannot be quantized")
            quantize_linear_layers(self._decoder)
        pack_linear_layers(self._model)
        self.lora_layers = self._make_lora_layers(lora_shapes, config) if config.max_loras > 0 else None
        text_config = self._model.config.get_text_config()
        self.context_length = default_context_length(text_config, config.max_model_len)
        self.vocab_size: int = text_config.vocab_size
        self.forward = ForwardPass(self._model, self._family, self._decoder, self.lora_layers)
        self.embedding_size = self.forward.embedding_size
        self.max_span_tokens = self._count_span_tokens(config)
        # One step holds the longest span together with one token of every other sequence.
        self._max_step_tokens = max(config.max_num_batched_tokens, self.max_span_tokens + config.max_num_seqs - 1)
        self._builder = StepBuilder(
            max_num_tokens=self._max_step_tokens,
            block_size=config.block_size,
            num_rope_axes=self._family.num_rope_axes,
            keeps_tokens=self._family.adds_embeddings,
            has_loras=config.max_loras > 0,
        )
        calls = self._probe_layers()
        layers = cache_shapes(calls)
        with shortage_explained(self._device, config, self._max_step_tokens):
            if self._device.type == "cuda":
                if self.lora_layers is None:
                    merge_linear_layers(self._decoder, self._probe_layers)
                with missing_tools_named():
                    self._compile_layers(layers, config)
            self.num_blocks = self._count_blocks(layers, config)
        self._attention = self._make_attention(layers, self.num_blocks, config)
        has_kernels = isinstance(self._attention, KernelAttention)
        max_threads = _max_threads(config, group)
        self._threads = StepThreads(max_threads) if has_kernels else None
        self._prompt_threads = ThreadBackoff(max_threads)
        if has_kernels:
            self.forward.fused = self._fuse(calls, config)
        self._graphs: DecodeGraphs | None = None
        if self._device.type == "cuda":
            with missing_tools_named():
                self._graphs = self._capture_graphs(config)
                self._run_first_steps(config)

    def _make_lora_layers(self, shapes: Mapping[str, LinearShape], config: EngineConfig) -> LoraLayers:
        return LoraLayers(
            self._decoder,
            shapes,
            max_loras=config.max_loras,
            max_rank=config.max_lora_rank,
            dtype=getattr(torch, config.dtype),
            device=self._device,
        )

    def _fuse(self, calls: Sequence[AttentionCall], config: EngineConfig) -> FusedDecoder | None:
        """Returns the decoder that runs in one call, or None if it is not plain or its results differ from
        transformers' forward."""
        attention = self._attention
        assert isinstance(attention, KernelAttention)
        num_positions = min(self.context_length, attention.num_slots)
        try:
            fused = FusedDecoder(
                attention.library,
                self._model,
                self._family,
                calls,
                attention.caches,
                num_positions=num_positions,
                max_num_tokens=self._max_step_tokens,
                max_num_logits=config.max_num_seqs,
            )
        except NotPlainError as reason:
            logger.info("the decoder's layers run one by one: it has %s", reason)
            return None
        is_same = agree(
            lambda step: self.forward.run_fused(fused, step, attention.prepare(step), wants_all_hidden=True),
            lambda step: self.forward.run_layers(step, attention.prepare(step)),
            self._builder,
            num_slots=attention.num_slots,
            block_size=config.block_size,
            num_positions=num_positions,
            vocab_size=self.vocab_size,
            embedding_size=self.embedding_size,
        )
        return fused if is_same else None

    def _probe_layers(self) -> list[AttentionCall]:
        text_config = self._model.config.get_text_config()
        return probe_layers(
            self._decoder, hidden_size=text_config.hidden_size, num_layers=text_config.num_hidden_layers
        )

    def _compile_layers(self, layers: Sequence[LayerShape], config: EngineConfig) -> None:
        def run(num_tokens: int) -> None:
            for has_items in (False, True) if self._family.takes_item_mask else (False,):
                num_positions = min(num_tokens, self.context_length)
                self._try_step(layers, config, num_tokens, num_positions, has_items=has_items)

        is_one_of_several = self._group is not None
        compile_layers(self._decoder, run, self._max_step_tokens, is_one_of_several=is_one_of_several)

    def _count_span_tokens(self, config: EngineConfig) -> int:
        """Returns the longest span in tokens that the engine accepts, or 0 for a family without spans.

        A span is computed in one step. The limit is the sum of the model's largest picture and a step's budget, capped
        by the context."""
        if not self._family.has_spans:
            return 0
        return min(config.max_num_batched_tokens + config.largest_item_tokens, self.context_length)

    def _count_blocks(self, layers: Sequence[LayerShape], config: EngineConfig) -> int:
        """Returns the number of blocks of the KV cache, which is the same on every rank."""
        kept = layers if self._kernels is None else [padded_shape(self._kernels, layer) for layer in layers]
        bytes_of_block = block_bytes(kept, block_size=config.block_size, dtype=_cache_dtype(config))
        num_bytes = config.kv_cache_bytes or self._cache_bytes(layers, config, bytes_of_block)
        num_blocks = num_bytes // bytes_of_block
        if num_blocks == 0:
            raise ValueError(f"kv_cache_bytes ({num_bytes}) does not hold a single block")
        if self._group is None:
            return num_blocks
        return int(self._group.all_gather(torch.tensor([num_blocks], device=self._device)).min())

    def _cache_bytes(self, layers: Sequence[LayerShape], config: EngineConfig, bytes_of_block: int) -> int:
        if self._device.type == "cpu":
            # The cache holds at least the largest picture and a step's budget beside it.
            num_needed = min(config.largest_item_tokens + config.max_num_batched_tokens, self.context_length)
            return max(_CPU_CACHE_BYTES, -(-num_needed // config.block_size) * bytes_of_block)

        def run() -> None:
            for has_loras in (False, True) if self.lora_layers is not None else (False,):
                num_tokens = self._max_step_tokens
                self._try_step(layers, config, num_tokens, self.context_length, has_items=True, has_loras=has_loras)

        return bytes_left_for_cache(
            run, self._device, config, num_tokens=self._max_step_tokens, bytes_of_block=bytes_of_block
        )

    @torch.inference_mode()
    def _try_step(
        self,
        layers: Sequence[LayerShape],
        config: EngineConfig,
        num_tokens: int,
        num_positions: int,
        *,
        has_items: bool,
        has_loras: bool = False,
    ) -> None:
        """Runs a step over the last `num_tokens` of a prompt, with a cache of a single block. `has_items`: all these
        tokens belong to items. `has_loras`: the tokens alternate between the first and the last adapter."""
        step = worst_step(
            num_tokens=num_tokens,
            num_positions=num_positions,
            num_logits=config.max_num_seqs,
            num_rope_axes=self._family.num_rope_axes,
            block_size=config.block_size,
            is_span=self._family.has_spans,
            embedding_size=self.embedding_size if has_items else None,
        ).to(self._device)
        if has_loras:
            step.row_slots = torch.arange(len(step.token_ids)) % 2 * (config.max_loras - 1)
        self.forward(step, self._make_attention(layers, 1, config).prepare(step))

    def _make_attention(self, layers: Sequence[LayerShape], num_blocks: int, config: EngineConfig) -> PagedAttention:
        make: Callable[..., PagedAttention] = CpuAttention
        if self._kernels is not None:
            make = partial(KernelAttention, self._kernels)
        elif self._device.type == "cuda":
            from raylens.llm.cuda.attention import CudaAttention  # needs Triton, which only PyTorch for GPUs has

            make = partial(CudaAttention, max_positions=self.context_length, device=self._device)
        return make(
            layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=_cache_dtype(config),
            windows_cut_spans=self._family.windows_cut_spans,
        )

    @torch.inference_mode()
    def _capture_graphs(self, config: EngineConfig) -> "DecodeGraphs | None":
        """Returns the CUDA graphs of decode steps, or None if the model cannot be recorded, because its forward
        synchronizes with the host. Raises all other errors of a decode step. Graphs contain the ranks' collectives, so
        either all ranks use graphs or none does."""
        from raylens.llm.cuda.attention import CudaAttention
        from raylens.llm.cuda.decode_graphs import DecodeGraphs

        assert isinstance(self._attention, CudaAttention)
        graphs: DecodeGraphs | None = None
        try:
            graphs = DecodeGraphs(
                self.forward,
                self._attention,
                max_num_seqs=config.max_num_seqs,
                max_length=self._longest_context(config.block_size),
                num_rope_axes=self._family.num_rope_axes,
                device=self._device,
                capture=CudaCapture(self._device),
            )
        except NotRecordableError:
            logger.warning("this model cannot run as CUDA graphs; decoding will be slower", exc_info=True)
        if self._group is None:
            return graphs
        num_graphs = self._group.all_gather(torch.tensor(int(graphs is not None), device=self._device)).sum()
        return graphs if num_graphs == self._group.world_size else None

    @torch.inference_mode()
    def _run_first_steps(self, config: EngineConfig) -> None:
        from raylens.llm.cuda.attention import CudaAttention

        assert isinstance(self._attention, CudaAttention)
        run_first_steps(
            self.run_step,
            block=self._attention.padding_block,
            block_size=config.block_size,
            num_rope_axes=self._family.num_rope_axes,
            max_length=self._longest_context(config.block_size),
        )

    def _longest_context(self, block_size: int) -> int:
        """Returns the most positions of a sequence, bounded by the model and the cache."""
        return min(self.context_length, self.num_blocks * block_size)

    def num_prompt_threads(self) -> int:
        """Returns the number of CPU threads of the next step with both prompts and decoding sequences."""
        return self._prompt_threads.next_number()

    @property
    def has_kernels(self) -> bool:
        """Returns whether Raylens' own kernels compute the model. Results of a row then do not depend on its batch."""
        return self._kernels is not None

    @property
    def stages_embeddings(self) -> bool:
        """Returns whether steps copy embeddings to a GPU. Several ranks get them by rank 0's messages instead."""
        return self._device.type == "cuda" and self._group is None

    def stage_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Returns a copy in the model's dtype and in pinned memory, which the GPU reads asynchronously."""
        return embeddings.to(self._model.dtype).pin_memory()

    def prompt_layout(self, prompt: ProcessedPrompt) -> PromptLayout:
        """Returns the prompt's layout. Raises InvalidRequestError if the items do not fit the prompt."""
        return self._family.layout(self._model, prompt)

    def run(self, chunks: Sequence[ScheduledChunk], chosen: torch.Tensor | None = None) -> StepOutput:
        """Computes the chunks, decode chunks first. `chosen`: see `StepBuilder.build`."""
        step = self._builder.build(chunks, chosen)
        return self.run_step(step) if self._group is None else run_on_all_ranks(self.run_step, self._group, step)

    def run_step(self, step: StepInput) -> StepOutput:
        """Computes a step on this rank. Every rank calls this."""
        if self._graphs is not None and self._graphs.fits(step):
            _, logits = self._graphs.run(step)
            return StepOutput(logits, [])
        step = step.to(self._device)
        run = partial(self.forward, step, self._attention.prepare(step))
        hidden, logits = run() if self._threads is None else self._with_threads(self._threads, step, run)
        return StepOutput(logits, self.forward.score(hidden, step) if step.scored else [])

    def _with_threads(
        self, threads: StepThreads, step: StepInput, run: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a step with a suitable number of threads. A step without decoding sequences takes all threads, because
        no stream waits for it and a first token does."""
        if step.num_decodes == 0:
            set_num_threads(threads.most)
            return run()
        only_decodes = step.num_decodes == len(step.query_lengths)
        set_num_threads(threads.next_number() if only_decodes else self.num_prompt_threads())
        started = time.perf_counter()
        done = run()
        seconds = time.perf_counter() - started
        if only_decodes:
            threads.note(step.num_decodes, seconds)
        else:
            self._prompt_threads.note(seconds)
        return done


def _max_threads(config: EngineConfig, group: ProcessGroup | None) -> int:
    """Returns the most threads of a step. Ranks synchronize after each layer, so each rank stays on its own cores."""
    if config.num_threads is not None:
        return config.num_threads
    return usable_cores() if group is None else torch.get_num_threads()


def _cache_dtype(config: EngineConfig) -> torch.dtype:
    name = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype
