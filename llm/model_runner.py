"""Runs the language half over the chunks of one step."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from raylens.cpu_kernels.library import kernel_library
from raylens.cpu_kernels.threads import ThreadBackoff, set_num_threads, usable_cores
from raylens.llm.attention import AttentionBackend, AttentionCall, PagedAttention, block_bytes
from raylens.llm.attention_variants.reference_windows import check_choices
from raylens.llm.cache_size import bytes_left_for_cache, check_cache_dtype, shortage_explained, worst_step
from raylens.llm.config import EngineConfig
from raylens.llm.cpu.attention import CpuAttention
from raylens.llm.cpu.fused_check import agree
from raylens.llm.cpu.fused_decoder import FusedDecoder, NotPlainError
from raylens.llm.cpu.kernel_attention import KernelAttention, padded_shape
from raylens.llm.cpu.packing import pack_language_half
from raylens.llm.cuda.compiled_layers import compile_layers
from raylens.llm.cuda.first_steps import missing_tools_named, run_first_steps
from raylens.llm.decoder_parts import find_parts
from raylens.llm.forward_pass import ForwardPass
from raylens.llm.layer_probe import cache_shapes, probe_layers
from raylens.llm.layer_types import REFERENCE, has_layers, num_attention_layers
from raylens.llm.loader import computing_dtype, load_language_half
from raylens.llm.lora.layers import LoraLayers, linear_shapes
from raylens.llm.pooler import Pooler
from raylens.llm.prompt_layout import PromptLayout
from raylens.llm.quantization_loss import MAX_TOKENS, QuantizationLoss, text_step
from raylens.llm.ranks.lockstep import run_on_all_ranks
from raylens.llm.ranks.parallel import ProcessGroup
from raylens.llm.request_checks import check_states
from raylens.llm.rotary_forms import in_its_form
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.states.cross_source import CrossSource
from raylens.llm.states.recurrent_states import RecurrentStates
from raylens.llm.step_input import StepBuilder, StepInput, StepOutput
from raylens.llm.step_threads import StepThreads
from raylens.modeling.attention_backends import turn_off_cudnn_attention
from raylens.modeling.context_length import default_context_length
from raylens.modeling.cuda_graphs import CudaCapture, NotRecordableError
from raylens.modeling.merged_linear import merge_linear_layers
from raylens.modeling.packed_linear import exact_products, has_stored_products, stored_products
from raylens.preprocess.schema import ProcessedPrompt

if TYPE_CHECKING:
    from raylens.llm.cuda.decode_graphs import DecodeGraphs

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 512 * 2**20
_SNAPSHOT_BYTES, _LEAST_SNAPSHOTS = 512 * 2**20, 8
"""Snapshots of recurrent states take so many bytes, but at least so many are kept."""


class ModelRunner:
    """Holds the weights and the KV cache, and runs chunks of sequences. Requests are the engine's concern."""

    def __init__(self, config: EngineConfig, group: ProcessGroup | None = None) -> None:
        """With a `group` this runner is one rank of several. All ranks but rank 0 run `lockstep.serve_steps`. Raises
        ValueError for an unsupported model or unsupported settings."""
        if config.max_loras > 0 and group is not None:
            raise ValueError("max_loras: a model divided among ranks serves no adapters")
        if config.quantization and group is not None:
            raise ValueError("quantization: weights divided among ranks cannot be quantized")
        turn_off_cudnn_attention()
        self._config = config
        self._group = group
        self._device = torch.device(config.device)
        is_cuda = self._device.type == "cuda"
        self._dtype = computing_dtype(config)
        named = config.kv_cache_dtype
        self._cache_dtype: torch.dtype = self._dtype if named == "auto" else getattr(torch, named)
        if is_cuda:
            check_cache_dtype(self._cache_dtype, self._device)
        is_float32 = self._dtype == self._cache_dtype == torch.float32
        self._kernels = kernel_library() if not is_cuda and is_float32 else None
        pack = partial(pack_language_half, config, is_divided=group is not None)
        self._model, self._family = load_language_half(config, group, pack)
        self._decoder = self._family.find_decoder(self._model)
        self.lora_layers = self._make_lora_layers()
        self.pooler = self._make_pooler()
        text_config = self._model.config.get_text_config()
        self.context_length = default_context_length(text_config, config.max_model_len)
        self.vocab_size: int = text_config.vocab_size
        self._parts = find_parts(self._model, self._family, self._decoder, self._kernels, config)
        if self._parts.variant is not None:
            self._kernels = None  # their attention takes neither choices nor biases
        self.forward = ForwardPass(self._model, self._family, self._decoder, self.lora_layers, self._parts)
        self.embedding_size = self.forward.embedding_size
        # The longest span that the engine accepts, in tokens. A span is computed in one step.
        longest_span = min(config.max_num_batched_tokens + config.largest_item_tokens, self.context_length)
        self.max_span_tokens = longest_span if self._family.has_spans else 0
        # One step holds the longest span together with one token of every other sequence.
        self._max_step_tokens = max(config.max_num_batched_tokens, self.max_span_tokens + config.max_num_seqs - 1)
        self._builder = StepBuilder(
            max_num_tokens=self._max_step_tokens,
            block_size=config.block_size,
            num_rope_axes=self._family.num_rope_axes,
            keeps_tokens=self._family.adds_embeddings or self._family.keeps_placeholders,
            has_loras=config.max_loras > 0,
        )
        calls = self._probe_layers()
        check_choices(calls, text_config)
        self._layers = [*cache_shapes(calls), *(() if self._parts.variant is None else self._parts.variant.shapes)]
        with shortage_explained(self._device, config, self._max_step_tokens):
            if is_cuda and self._parts.cross is None:
                if self.lora_layers is None:
                    merge_linear_layers(self._decoder, self._probe_layers)
                with missing_tools_named():
                    self._compile_layers()
            self.num_snapshots = 0 if self._parts.states is None else self._make_slots(self._parts.states)
            self.num_blocks, self.num_cross_blocks = self._count_blocks()
        if self._parts.cross is not None:
            num_slots = self.num_cross_blocks * config.block_size
            if config.largest_item_tokens > num_slots:
                raise ValueError(
                    f"kv_cache_bytes: the cache holds cross states of {num_slots} tokens, the model's largest picture"
                    f" has {config.largest_item_tokens}"
                )
            self._parts.cross.allocate(self.num_cross_blocks, config.block_size, self._cache_dtype)
        self.max_model_len = min(self.context_length, self.num_blocks * config.block_size)
        self._attention = self._make_attention(self.num_blocks)
        # Ranks synchronize after each layer, so each rank stays on its own cores.
        max_threads = config.num_threads or (usable_cores() if group is None else torch.get_num_threads())
        self.prompt_threads = ThreadBackoff(max_threads)
        """The number of CPU threads of steps with both prompts and decoding sequences."""
        self._threads: StepThreads | None = None
        if isinstance(self._attention, KernelAttention):
            self._threads = StepThreads(max_threads)
            self.forward.fused = self._fuse(self._attention, calls)
        self._graphs: DecodeGraphs | None = None
        if is_cuda:
            with missing_tools_named():
                # Recorded kernels would read the slots of the recorded step.
                can_record = self._parts.states is None and self._parts.cross is None
                self._graphs = self._capture_graphs() if can_record else None
                self._run_first_steps()

    def _make_pooler(self) -> Pooler | None:
        config = self._config
        if config.pooling is None:
            return None
        return Pooler(config.pooling, self._model, self._family, checkpoint=config.model, revision=config.revision)

    def _make_lora_layers(self) -> LoraLayers | None:
        config = self._config
        if config.max_loras == 0:
            return None
        return LoraLayers(
            self._decoder,
            linear_shapes(self._decoder),
            max_loras=config.max_loras,
            max_rank=config.max_lora_rank,
            dtype=self._dtype,
            device=self._device,
        )

    def _make_slots(self, states: RecurrentStates) -> int:
        """Allocates a slot for each running sequence and for snapshots. Returns the number of snapshots."""
        config, num_snapshots = self._config, 0
        if config.prefix_caching:
            num_snapshots = min(max(_SNAPSHOT_BYTES // states.slot_bytes, _LEAST_SNAPSHOTS), 4 * config.max_num_seqs)
        states.allocate(config.max_num_seqs + num_snapshots)
        return num_snapshots

    @property
    def has_cheap_rows(self) -> bool:
        """Returns whether some more rows of a sequence delay a step little and change no answer: Raylens' own kernels
        compute the model, and each layer takes the rows at once."""
        return self._kernels is not None and (self._parts.states is None or self._parts.states.are_in_slots)

    @property
    def has_states(self) -> bool:
        """Returns whether some layers have a recurrent state."""
        return self._parts.states is not None

    def _fuse(self, attention: KernelAttention, calls: Sequence[AttentionCall]) -> FusedDecoder | None:
        """Returns the decoder that runs in one call, or None if it is not plain or differs from transformers'
        forward."""
        try:
            fused = FusedDecoder(
                attention.library,
                self._model,
                self._family,
                calls,
                attention.caches,
                num_positions=self.max_model_len,
                max_num_tokens=self._max_step_tokens,
                max_num_logits=self._config.max_num_seqs,
            )
        except NotPlainError as reason:
            logger.info("the decoder's layers run one by one: it has %s", reason)
            return None
        with exact_products(self._model):
            is_same = agree(
                lambda step: self.forward.run_fused(fused, step, attention.prepare(step), wants_all_hidden=True),
                lambda step: self.forward.run_layers(step, attention.prepare(step)),
                self._builder,
                num_slots=attention.num_slots,
                block_size=self._config.block_size,
                num_positions=self.max_model_len,
                vocab_size=self.vocab_size,
                embedding_size=self.embedding_size,
            )
        return fused if is_same else None

    @torch.inference_mode()
    def quantization_loss(self, token_ids: list[int]) -> QuantizationLoss | None:
        """Compares the next token's distributions over a text with those of the stored weights. Writes to the first
        slots of the cache. Returns None unless these weights are in mapped files, which a second call does not find,
        and for a model that takes no prompt of text alone."""
        cross = self._family.cross
        needs_items = cross is not None and cross.encoder is not None
        if needs_items or not has_stored_products(self._model):
            return None
        token_ids = token_ids[: min(MAX_TOKENS, self._builder.max_num_tokens, self.max_model_len)]
        layout = self.prompt_layout(ProcessedPrompt(token_ids, [], []))
        step = text_step(self._builder, token_ids, layout, self._config.block_size)
        step.pooled = [(0, len(token_ids))]  # all hidden states are wanted

        def logits(run: Callable[[StepInput, AttentionBackend], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
            return self.forward.logits(run(step, self._attention.prepare(step))[0])

        with exact_products(self._model), stored_products(self._model):
            stored = logits(self.forward.run_layers)
        return QuantizationLoss.of(stored, logits(self.forward))

    def _probe_layers(self) -> list[AttentionCall]:
        text_config = self._model.config.get_text_config()
        cross = self._parts.cross
        inputs = self.forward.inputs_of_tokens(torch.zeros(1, dtype=torch.long, device=self._device))
        return probe_layers(
            self._decoder,
            hidden_size=text_config.hidden_size,
            num_layers=num_attention_layers(text_config) if cross is None else cross.num_attention_layers,
            inputs=inputs if cross is None else inputs | cross.probe_inputs(),
        )

    def _compile_layers(self) -> None:
        def run(num_tokens: int) -> None:
            for has_items in (False, True) if self._family.takes_item_mask else (False,):
                self._try_step(num_tokens, min(num_tokens, self.context_length), has_items=has_items)

        compile_layers(self._decoder, run, self._max_step_tokens, is_one_of_several=self._group is not None)

    def _count_blocks(self) -> tuple[int, int]:
        """Returns the number of blocks of the KV cache, which is the same on every rank, and of blocks of cross states.
        Each gets half of the memory."""
        layers = self._layers if self._kernels is None else [padded_shape(self._kernels, one) for one in self._layers]
        bytes_of_block = block_bytes(layers, block_size=self._config.block_size, dtype=self._cache_dtype)
        num_bytes = self._config.kv_cache_bytes or self._cache_bytes(bytes_of_block)
        num_blocks = num_bytes // bytes_of_block
        num_cross_blocks = 0
        if self._parts.cross is not None:
            num_blocks //= 2
            num_cross_blocks = num_bytes // (
                2 * self._parts.cross.bytes_of_block(self._config.block_size, self._cache_dtype)
            )
        if num_blocks == 0 or (self._parts.cross is not None and num_cross_blocks == 0):
            raise ValueError(f"kv_cache_bytes ({num_bytes}) does not hold a single block")
        if self._group is not None:
            num_blocks = int(self._group.all_gather(torch.tensor([num_blocks], device=self._device)).min())
        return num_blocks, num_cross_blocks

    def _cache_bytes(self, bytes_of_block: int) -> int:
        config, num_tokens = self._config, self._max_step_tokens
        if self._device.type == "cpu":
            # The cache holds at least the largest picture and a step's budget beside it.
            num_needed = min(config.largest_item_tokens + config.max_num_batched_tokens, self.context_length)
            return max(_CPU_CACHE_BYTES, -(-num_needed // config.block_size) * bytes_of_block)

        def run() -> None:
            for has_loras in (False, True) if self.lora_layers is not None else (False,):
                self._try_step(num_tokens, self.context_length, has_items=True, has_loras=has_loras)

        return bytes_left_for_cache(run, self._device, config, num_tokens=num_tokens, bytes_of_block=bytes_of_block)

    @torch.inference_mode()
    def _try_step(self, num_tokens: int, num_positions: int, *, has_items: bool, has_loras: bool = False) -> None:
        """Runs a step over the last `num_tokens` of a prompt, with a cache of a single block. `has_items`: all these
        tokens belong to items. `has_loras`: the tokens alternate between the first and the last adapter."""
        step = worst_step(
            num_tokens=num_tokens,
            num_positions=num_positions,
            num_logits=self._config.max_num_seqs,
            num_rope_axes=self._family.num_rope_axes,
            block_size=self._config.block_size,
            is_span=self._family.has_spans,
            embedding_size=self.embedding_size if has_items else None,
        ).to(self._device)
        if has_loras:
            step.row_slots = torch.arange(len(step.token_ids)) % 2 * (self._config.max_loras - 1)
        self.forward(step, self._make_attention(1).prepare(step))

    def _make_attention(self, num_blocks: int) -> PagedAttention:
        make: Callable[..., PagedAttention] = CpuAttention
        if self._kernels is not None:
            make = partial(KernelAttention, self._kernels)
        elif self._device.type == "cuda":
            from raylens.llm.cuda.attention import CudaAttention  # needs Triton, which only PyTorch for GPUs has

            make = partial(CudaAttention, max_positions=self.context_length, device=self._device)
        return make(
            self._layers,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            dtype=self._cache_dtype,
            windows_cut_spans=self._family.windows_cut_spans,
            spans_need_window=self._family.spans_need_window,
        )

    @torch.inference_mode()
    def _capture_graphs(self) -> "DecodeGraphs | None":
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
                max_num_seqs=self._config.max_num_seqs,
                max_length=self.max_model_len,
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
    def _run_first_steps(self) -> None:
        run_first_steps(
            self.run_step,
            block=self.num_blocks,  # the padding block of `CudaAttention`
            block_size=self._config.block_size,
            num_rope_axes=self._family.num_rope_axes,
            max_length=self.max_model_len,
        )

    @property
    def stage_embeddings(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Returns a function that copies embeddings to pinned memory, in the model's dtype, or None if steps copy no
        embeddings to a GPU. Several ranks get embeddings by rank 0's messages."""
        if self._device.type != "cuda" or self._group is not None:
            return None
        return lambda embeddings: embeddings.to(self._model.dtype).pin_memory()

    def populate_cache(self) -> None:
        """Makes the memory of a cache on the CPU available before steps need it. Thread-safe."""
        if isinstance(self._attention, KernelAttention):
            self._attention.populate()

    @property
    def items_fill_context(self) -> bool:
        """Returns whether an item's tokens take positions of the decoder or of its text encoder."""
        return self._family.cross is None or self._family.cross.encoder is not None

    def split_prompt(self, prompt: ProcessedPrompt) -> tuple[ProcessedPrompt, CrossSource | None]:
        """Returns the decoder's part of a prompt, and the origin of its cross states. Raises InvalidRequestError if the
        items do not fit the prompt, or the states not the cache."""
        if self._family.cross is None:
            return prompt, None
        own, source = self._family.cross.split(self._model, prompt)
        check_states(source.num_states, self.num_cross_blocks * self._config.block_size)
        return own, source

    def prompt_layout(self, prompt: ProcessedPrompt) -> PromptLayout:
        """Returns the prompt's layout. Raises InvalidRequestError if the items do not fit the prompt."""
        layout = self._family.layout(self._model, prompt)
        if has_layers(self._model.config.get_text_config(), REFERENCE):
            # Keys of an answer differ from those of the same tokens in a prompt, which see more.
            layout = replace(layout, is_prefix_cacheable=False)
        return in_its_form(layout, len(prompt.prompt_token_ids), self._model.config.get_text_config())

    def run(self, chunks: Sequence[ScheduledChunk], chosen: torch.Tensor | None = None) -> StepOutput:
        """Computes the chunks, decode chunks first. `chosen`: see `StepBuilder.build`."""
        step = self._builder.build(chunks, chosen)
        return self.run_step(step) if self._group is None else run_on_all_ranks(self.run_step, self._group, step)

    def run_step(self, step: StepInput) -> StepOutput:
        """Computes a step on this rank. Every rank calls this."""
        if self._graphs is not None and self._graphs.fits(step):
            _, logits = self._graphs.run(step)
            return StepOutput(logits)
        step = step.to(self._device)
        run = partial(self.forward, step, self._attention.prepare(step))
        hidden, logits = run() if self._threads is None else self._with_threads(self._threads, step, run)
        return StepOutput(logits, self.forward.score(hidden, step) if step.scored else [], self._pool(hidden, step))

    def _pool(self, hidden: torch.Tensor, step: StepInput) -> list[torch.Tensor]:
        if not step.pooled:
            return []
        assert self.pooler is not None, "the engine takes no prompts to be pooled without one"
        return [self.pooler.part(hidden[start:stop]) for start, stop in step.pooled]

    def _with_threads(
        self, threads: StepThreads, step: StepInput, run: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a step with a suitable number of threads. A step without decoding sequences takes all threads, because
        no stream waits for it and a first token does."""
        if step.num_decodes == 0:
            set_num_threads(threads.most)
            return run()
        only_decodes = step.num_decodes == len(step.query_lengths)
        set_num_threads(threads.next_number() if only_decodes else self.prompt_threads.next_number())
        started = time.perf_counter()
        done = run()
        seconds = time.perf_counter() - started
        if only_decodes:
            threads.note(step.num_decodes, seconds)
        else:
            self.prompt_threads.note(seconds)
        return done
