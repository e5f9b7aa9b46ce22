"""The LLM engine: call `add_request`, then `step` until `has_unfinished` is false. Synchronous, one thread.

A step schedules chunks, runs the model over them, samples tokens, and returns an output for each sequence with a token.
With asynchronous scheduling it launches all that and returns the outputs of the previous step."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from transformers import AutoTokenizer

from raylens.llm.adapter_slots import LoraAdapters
from raylens.llm.answers import Answers, AnswerState, Request, make_items
from raylens.llm.block_manager import BlockManager, private_root, shared_root, states_root
from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.config import NO_ASYNC_WITH_RANKS, EngineConfig
from raylens.llm.detokenizer import Detokenizer, decoder_of
from raylens.llm.generation_defaults import load_generation_defaults
from raylens.llm.lora.request import LoraRequest
from raylens.llm.model_runner import ModelRunner
from raylens.llm.outputs import EngineStats, RequestOutput
from raylens.llm.prompt_lookup import PromptLookup
from raylens.llm.quantization_loss import NOT_MEASURED, TEXT
from raylens.llm.ranks.parallel import ProcessGroup, RankDiedError
from raylens.llm.request_checks import check_embeddings, check_room, check_scoring, check_spans
from raylens.llm.sampling.excluded_tokens import ExcludedTokens
from raylens.llm.sampling.grammar import GrammarCompiler
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.llm.sampling.thoughts import Thoughts
from raylens.llm.scheduler import Scheduler
from raylens.llm.sequence import Sequence
from raylens.llm.states.cross_source import CrossBlocks
from raylens.llm.states.state_slots import StateSlots
from raylens.llm.step_budget import StepBudget
from raylens.llm.step_clock import StepClock
from raylens.llm.step_in_flight import StepInFlight, StepLauncher
from raylens.preprocess.schema import ProcessedPrompt

logger = logging.getLogger(__name__)

_FATAL = (torch.AcceleratorError, RankDiedError)
"""The device or another rank has failed. Every later step would fail, too."""
_MAX_DRAFT_ROWS = 8
"""On the CPU, a step of up to so many rows takes about as long as a step of one: reading the weights dominates."""


class LLMEngine:
    """Continuous batching over a paged KV cache. Requests join and leave between any two steps."""

    def __init__(self, config: EngineConfig, group: ProcessGroup | None = None) -> None:
        """With a `group` this engine is rank 0 of several ranks, see `ModelRunner`."""
        self._config = config
        self._goes_ahead = _goes_ahead(config, group)
        self._runner = ModelRunner(config, group)
        has_states, num_snapshots = self._runner.has_states, self._runner.num_snapshots
        slots = StateSlots(config.max_num_seqs, num_snapshots, config.block_size) if has_states else None
        num_cross_blocks = self._runner.num_cross_blocks
        cross = CrossBlocks(num_cross_blocks, config.block_size) if num_cross_blocks else None
        self._block_manager = BlockManager(self._runner.num_blocks, config.block_size, slots, cross)
        self._looks_up = self._runner.has_cheap_rows if config.prompt_lookup is None else config.prompt_lookup
        self._scheduler = Scheduler(
            self._block_manager,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            max_draft_rows=_MAX_DRAFT_ROWS if self._looks_up else 0,
            step_budget=StepBudget(config.max_decode_slowdown, self._runner.prompt_threads.next_number),
        )
        tokenizer = AutoTokenizer.from_pretrained(config.model, revision=config.revision, trust_remote_code=False)
        if config.quantization:
            loss = self._runner.quantization_loss(tokenizer(TEXT).input_ids)
            logger.info("quantization %s: %s", config.quantization, loss or NOT_MEASURED)
        # By whether the decoder skips special tokens.
        self._decoders = {skips: decoder_of(tokenizer, skip_special_tokens=skips) for skips in (True, False)}
        self._defaults = load_generation_defaults(config.model, config.revision, tokenizer.eos_token_id)
        self.byte_tokenizer = ByteTokenizer(tokenizer, self._runner.vocab_size, self._defaults.eos_token_ids)
        self.grammar_compiler = GrammarCompiler(self.byte_tokenizer)
        self._clock = StepClock()
        self._answers = Answers(self._scheduler, self._block_manager, self._runner.pooler)
        self._launcher = StepLauncher(self._runner, self._block_manager, self._answers, self._clock)
        self._in_flight: StepInFlight | None = None
        """The launched step whose tokens have not been read."""
        layers = self._runner.lora_layers
        self._adapters = None if layers is None else LoraAdapters(layers, config.max_loras)
        self._is_stalled = False
        self.max_model_len = self._runner.max_model_len
        if self._runner.items_fill_context and config.largest_item_tokens >= self.max_model_len:
            raise ValueError(
                f"the model's largest picture takes {config.largest_item_tokens} tokens, which the context of"
                f" {self.max_model_len} tokens does not hold beside an answer: max_model_len is"
                f" {self._runner.context_length}, the KV cache holds {self._runner.num_blocks * config.block_size}"
                f" tokens ({self._runner.num_blocks} blocks). Raise the smaller of the two, or have the checkpoint's"
                " processor make pictures smaller"
            )

    def add_request(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        embeddings: Seq[torch.Tensor | None],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        prompt_salt: str = "",
        priority: int = 0,
        lora: LoraRequest | None = None,
        arrival: float | None = None,
        pools: bool = False,
    ) -> None:
        """Queues a request.

        `embeddings[i]`: (num_embeds, embedding_size), fills `prompt.placeholders[i]`. None: follows by
        `set_embeddings`; the engine computes the prompt up to that placeholder meanwhile.
        `cache_salt`: the tenant. Tenants take turns, and share no entries of the prefix cache. `prompt_salt`: nor do
        requests with different ones. `priority`: lower first.
        `lora`: the adapter, loaded on demand. If it cannot be read, an output of `step` has the LoraError.
        `arrival`: start of the request's wait, in seconds of `time.perf_counter`; None: now.
        `pools`: the output has the prompt's embeddings or scores, for a config with a pooling and `max_tokens` of 0.

        Raises InvalidRequestError for a request that can never run: embeddings of a wrong shape, a prompt or answer
        beyond the context, tokens outside the vocabulary, or an invalid grammar. Raises ValueError for a `request_id`
        that is in the engine already, and for an adapter if `max_loras` is 0. The thread-safe `grammar_compiler` can
        compile a grammar beforehand, which takes its time off this call."""
        if request_id in self._answers.requests:
            raise ValueError(f"request {request_id} is in the engine already")
        if lora is not None and self._adapters is None:
            raise ValueError(f"no adapters are served, as {lora.name!r}: max_loras is 0")
        items = make_items(prompt, embeddings, self._runner.embedding_size)
        request = Request(prompt, items)
        prompt, source = self._runner.split_prompt(prompt)
        num_prompt_tokens = len(prompt.prompt_token_ids)
        check_room(num_prompt_tokens, params, self.max_model_len)
        layout = self._runner.prompt_layout(prompt)
        check_spans(layout, self._runner.max_span_tokens)
        shares_prefix = self._config.prefix_caching and layout.is_prefix_cacheable
        root = shared_root(cache_salt, prompt_salt, lora) if shares_prefix else private_root()
        pooled_from = self._first_pooled(num_prompt_tokens) if pools else None
        if source is not None:
            check_scoring(source, params, pools=pools)
            root = states_root(root, source, items)
            for item in items:
                item.positions = ()
        wanted = self.max_model_len if params.max_tokens is None else params.max_tokens
        max_num_tokens = min(self.max_model_len, num_prompt_tokens + wanted)
        first: Sequence | None = None
        for index, state in enumerate(self._sampler_states(prompt, self._with_defaults(params, prompt))):
            sequence = Sequence(
                request_id=request_id,
                token_ids=list(prompt.prompt_token_ids),
                num_prompt_tokens=num_prompt_tokens,
                items=items,
                max_num_tokens=max_num_tokens,
                layout=layout,
                index=index,
                parent=first,
                prefix_root=root,
                num_prompt_logprobs=params.prompt_logprobs if first is None else None,
                pooled_from=pooled_from,
                tenant=cache_salt,
                priority=priority,
                lora=lora,
                cross_source=source,
            )
            first = first or sequence
            if arrival is not None:
                sequence.times.arrival = arrival
            # With a form of the answer, other threads need time for the mask of each token.
            if params.structured_output is None and not pools:
                sequence.lookup = self._lookup_of(sequence)
            has_stop = bool(self._defaults.stop_strings(params))
            detokenizer = self.make_detokenizer(params, request.prompt) if has_stop else None
            request.answers[sequence] = AnswerState(state, detokenizer)
            self._scheduler.add(sequence)
        self._answers.requests[request_id] = request
        self._is_stalled = False

    def _first_pooled(self, num_prompt_tokens: int) -> int:
        assert self._runner.pooler is not None, "the config has a pooling"
        return self._runner.pooler.first_position(num_prompt_tokens)

    def _lookup_of(self, sequence: Sequence) -> PromptLookup | None:
        """Returns what guesses a sequence's tokens. By default none with an adapter, whose products round differently
        in a larger batch."""
        looks_up = self._looks_up and (sequence.lora is None or self._config.prompt_lookup)
        return PromptLookup(sequence.token_ids, self._runner.vocab_size) if looks_up else None

    def make_detokenizer(self, params: SamplingParams, prompt: ProcessedPrompt) -> Detokenizer:
        """Returns a detokenizer for one answer. It lets the caller turn ids into text while the next step runs."""
        prompt, _ = self._runner.split_prompt(prompt)
        return Detokenizer(
            self._decoders[params.skip_special_tokens],
            self._defaults.stop_strings(params),
            includes_stop=params.include_stop_str_in_output,
            min_tokens=self._with_defaults(params, prompt).min_tokens or 0,
            before=prompt.prompt_token_ids if prompt.is_continued else (),
        )

    @property
    def stage_embeddings(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A thread-safe function that copies an item's embeddings to the memory that steps read fastest, which takes
        some milliseconds for a large picture. None: steps need no copy."""
        return self._runner.stage_embeddings

    def populate_cache(self) -> None:
        """Makes the memory of a KV cache on the CPU available now. Otherwise the system provides each page to the first
        prompt that needs it: half a second for a small model's first prompts. Thread-safe."""
        self._runner.populate_cache()

    def set_embeddings(self, request_id: str, index: int, embeddings: torch.Tensor) -> None:
        """Sets the embeddings of item `index`, (num_embeds, embedding_size). Does nothing for an unknown or ended
        request. Raises InvalidRequestError for a wrong shape; the request then keeps waiting."""
        request = self._answers.requests.get(request_id)
        if request is None:
            return
        check_embeddings(index, request.prompt.placeholders[index], embeddings, self._runner.embedding_size)
        request.items[index].embeddings = embeddings
        self._is_stalled = False

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks, unless the request has ended or is unknown."""
        if self._answers.abort(request_id):
            self._is_stalled = False
            self._rest_if_idle()

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished()

    @property
    def is_idle(self) -> bool:
        """Returns whether steps have nothing to do until a request, embeddings or an adapter arrive."""
        is_stalled = self._is_stalled and not (self._adapters is not None and self._adapters.has_news)
        return is_stalled or not self._scheduler.has_unfinished()

    def check_adapter(self, folder: str) -> None:
        """Raises LoraError for an invalid adapter. Reads its settings and shapes, not its weights. Thread-safe."""
        assert self._adapters is not None, "the settings have adapters only together with places for them"
        self._adapters.check(folder)

    def call_when_adapter_read(self, wake: Callable[[], None]) -> None:
        """Registers `wake`, called on another thread when an adapter has been read, because the engine may be idle."""
        if self._adapters is not None:
            self._adapters.on_read = wake

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_lacking_tokens=self._scheduler.num_lacking_tokens,
            kv_cache_usage=self._block_manager.usage,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._clock.num_steps,
            step_seconds=self._clock.seconds,
            num_prefill_tokens=self._scheduler.num_prefill_tokens,
            num_decoded_sequences=self._scheduler.num_decoded_sequences,
            num_prefix_queries=self._scheduler.num_prefix_queries,
            num_prefix_hits=self._scheduler.num_prefix_hits,
            num_draft_tokens=self._launcher.num_draft_tokens,
            num_accepted_tokens=self._launcher.num_accepted_tokens,
        )

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns its outputs. A failing step ends its own requests with `ERROR`; other requests
        continue. With asynchronous scheduling this launches a step and returns the outputs of the previous one.

        Raises torch.AcceleratorError and RankDiedError, after which no step can succeed. Steps are somewhat faster on a
        thread that stays in `torch.inference_mode`."""
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.step()
        self._clock.start()
        outputs = [] if self._adapters is None else self._place_adapters(self._adapters)
        with self._clock.part("schedule"):
            chunks = self._scheduler.schedule()
        late_masks = self._launcher.late_masks
        late_masks.forget_gone()
        before, self._in_flight = self._in_flight, None
        self._is_stalled = not (chunks or late_masks.sequences or before)
        if self._is_stalled:
            return outputs
        launched: StepInFlight | None = None
        failed: list[Sequence] = []
        if chunks or before is None:  # else the step before only has to be read
            try:
                launched = self._launcher.launch(chunks, self._scheduler.num_decodes, before)
            except _FATAL:
                raise
            except Exception:
                failed = _told([chunk.sequence for chunk in chunks])
        if before is not None:
            outputs += self._read(before)
        outputs += self._answers.fail_all(failed)
        if launched is not None:
            outputs += self._choose(launched)
        self._rest_if_idle()
        self._clock.end()
        return outputs

    def _choose(self, step: StepInFlight) -> list[RequestOutput]:
        """Launches the sampling of the step's tokens. Reads the tokens if the next step needs them."""
        late = self._launcher.late_masks.sequences
        try:
            self._launcher.choose(step)
        except _FATAL:
            raise
        except Exception:
            return self._answers.fail_all(_told([*step.sequences, *late]))
        if self._goes_ahead and not step.must_be_read:
            self._in_flight = step
            return []
        return self._read(step)

    def _read(self, step: StepInFlight) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        try:
            outputs.extend(self._launcher.read(step))  # keeps those before an error: answers have ended with them
        except _FATAL:
            raise
        except Exception:
            outputs += self._answers.fail_all(_told(step.sequences))
        seconds = self._clock.note_read(step.launched_at)
        self._scheduler.note_step(step.chunks, step.num_decodes, seconds)
        return outputs

    def _place_adapters(self, adapters: LoraAdapters) -> list[RequestOutput]:
        """Gives waiting sequences their adapters. Returns the outputs of requests whose adapter cannot be read."""
        failures = adapters.place(self._scheduler.waiting, self._scheduler.running)
        if not failures:
            return []
        failed = {one.request_id: failures[one.lora] for one in self._scheduler.waiting if one.lora in failures}
        return [output for request_id, error in failed.items() for output in self._answers.fail(request_id, error)]

    def check_integrity(self) -> None:
        """Raises RuntimeError if a block of the KV cache is lost or its reference count is wrong."""
        self._block_manager.check_integrity([*self._scheduler.running, *self._scheduler.waiting])

    def _rest_if_idle(self) -> None:
        """If no sequence is unfinished, drops the step in flight, and checks that no block or request is still held."""
        if self._scheduler.has_unfinished():
            return
        self._in_flight = None
        if self._block_manager.usage or self._answers.requests:
            raise RuntimeError(
                f"idle with {self._block_manager.usage:.1%} of the KV cache, {len(self._answers.requests)} requests"
            )

    def _sampler_states(self, prompt: ProcessedPrompt, params: SamplingParams) -> list[SamplerState]:
        wanted, vocab_size = params.structured_output, self._runner.vocab_size
        grammar = None if wanted is None else self.grammar_compiler.compile(wanted)
        excluded = ExcludedTokens.of(params, self.byte_tokenizer, vocab_size, self._defaults.suppressed_token_ids)
        return [
            SamplerState(
                params,
                prompt.prompt_token_ids,
                vocab_size=vocab_size,
                eos_token_ids=self._defaults.eos_token_ids,
                grammar=grammar,
                excluded=excluded,
                index=index,
                thoughts=self._thoughts(prompt, params),
            )
            for index in range(params.n)
        ]

    def _thoughts(self, prompt: ProcessedPrompt, params: SamplingParams) -> Thoughts | None:
        """Returns what follows an answer's thoughts, or None if nothing depends on them."""
        form, budget = prompt.thoughts, params.thinking_token_budget
        if form is None or (budget is None and params.structured_output is None):
            return None
        thoughts = Thoughts(self.byte_tokenizer, form, is_open=prompt.is_thinking, budget=budget)
        # Several tokens that begin a start tag may also begin the answer's form: then there are no thoughts.
        can_begin = thoughts.is_thinking or thoughts.opening_token_id is not None
        return thoughts if can_begin or params.structured_output is None else None

    def _with_defaults(self, params: SamplingParams, prompt: ProcessedPrompt) -> SamplingParams:
        num_prompt_tokens = len(prompt.prompt_token_ids)
        return self._defaults.fill(params, num_prompt_tokens, self.max_model_len - num_prompt_tokens)


def _goes_ahead(config: EngineConfig, group: ProcessGroup | None) -> bool:
    """Returns whether a step is launched before the previous one is read."""
    if config.async_scheduling is None:
        return config.device.startswith("cuda") and group is None
    if config.async_scheduling and group is not None:
        raise ValueError(f"async_scheduling: {NO_ASYNC_WITH_RANKS}")
    return config.async_scheduling


def _told(sequences: list[Sequence]) -> list[Sequence]:
    """Logs the exception that ends these sequences, and returns them."""
    logger.exception("step failed for requests %s", [sequence.request_id for sequence in sequences])
    return sequences
