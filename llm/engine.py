"""The LLM engine: call `add_request`, then `step` until `has_unfinished` is false. Synchronous, one thread.

A step schedules chunks, runs the model over them, samples tokens, and makes an output for each sequence with a token.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate, islice

import torch
from transformers import AutoTokenizer

from llm.block_manager import BlockManager
from llm.byte_tokenizer import ByteTokenizer
from llm.config import EngineConfig
from llm.detokenizer import Detokenizer, decoder_of
from llm.excluded_tokens import ExcludedTokens
from llm.generation_defaults import default_sampling, eos_token_ids, load_generation_config
from llm.grammar import GrammarCompiler
from llm.late_masks import LateMasks, Sampling
from llm.logprobs import TokenLogprobs
from llm.lora_adapters import LoraAdapters
from llm.lora_request import LoraError, LoraRequest
from llm.model_runner import ModelRunner
from llm.outputs import EngineStats, RequestOutput
from llm.parallel import ProcessGroup, RankDiedError
from llm.prefix_cache import private_root, shared_root
from llm.prompt_lookup import PromptLookup
from llm.request import AnswerState, Request, make_items
from llm.request_checks import check_embeddings, check_room, check_spans
from llm.sampler import SampledToken, sample
from llm.sampler_state import SamplerState
from llm.sampling_params import SamplingParams
from llm.scheduler import ScheduledChunk, Scheduler
from llm.sequence import FinishReason, Sequence
from llm.step_budget import StepBudget
from llm.step_clock import StepClock
from preprocess.schema import InvalidRequestError, ProcessedPrompt

logger = logging.getLogger(__name__)

_MAX_DRAFT_ROWS = 8
"""On the CPU, a step of up to so many rows reads the weights about as fast as a step of one."""


class LLMEngine:
    """Continuous batching over a paged KV cache. Requests join and leave between any two steps."""

    def __init__(self, config: EngineConfig, group: ProcessGroup | None = None) -> None:
        """With a `group` this engine is rank 0 of several ranks, see `ModelRunner`."""
        self._config = config
        self._runner = ModelRunner(config, group)
        self._block_manager = BlockManager(self._runner.num_blocks, config.block_size)
        self._looks_up = self._runner.has_kernels if config.prompt_lookup is None else config.prompt_lookup
        self._scheduler = Scheduler(
            self._block_manager,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            max_draft_rows=_MAX_DRAFT_ROWS if self._looks_up else 0,
            step_budget=_step_budget(config, self._runner),
            short_prompt_share=config.short_prompt_share,
        )
        tokenizer = AutoTokenizer.from_pretrained(config.model, revision=config.revision)
        # The key is whether the decoder leaves special tokens out.
        self._decoders = {skips: decoder_of(tokenizer, skip_special_tokens=skips) for skips in (True, False)}
        generation = load_generation_config(config.model, config.revision)
        self._eos_token_ids = eos_token_ids(generation, tokenizer.eos_token_id)
        self._default_sampling = default_sampling(generation)
        self.byte_tokenizer = ByteTokenizer(tokenizer, self._runner.vocab_size, self._eos_token_ids)
        self.grammar_compiler = GrammarCompiler(self.byte_tokenizer)
        self._requests: dict[str, Request] = {}
        self._late_masks = LateMasks()
        layers = self._runner.lora_layers
        self._adapters = None if layers is None else LoraAdapters(layers, config.max_loras)
        self._is_stalled = False
        self._clock = StepClock()
        self._num_draft_tokens = self._num_accepted_tokens = 0
        self.max_model_len = config.max_model_len or self._runner.max_position_embeddings
        self.max_model_len = min(self.max_model_len, self._runner.num_blocks * config.block_size)
        self._check_largest_item()

    def _check_largest_item(self) -> None:
        """Raises ValueError where the context has no room for the model's largest picture and an answer."""
        config, num_blocks = self._config, self._runner.num_blocks
        if config.largest_item_tokens >= self.max_model_len:
            raise ValueError(
                f"the model's largest picture takes {config.largest_item_tokens} tokens, which the context of"
                f" {self.max_model_len} tokens does not hold beside an answer: max_model_len is"
                f" {config.max_model_len or self._runner.max_position_embeddings}, the KV cache holds"
                f" {num_blocks * config.block_size} tokens ({num_blocks} blocks). Raise what is too small, or have the"
                " checkpoint's processor make pictures smaller"
            )

    def add_request(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        embeddings: Seq[torch.Tensor | None],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        lora: LoraRequest | None = None,
        arrival: float | None = None,
    ) -> None:
        """Queues a request. `embeddings[i]`, (num_embeds, embedding_size), fills `prompt.placeholders[i]`. `arrival`:
        since when the request waits, in seconds of `time.perf_counter`; None: since now.

        None stands for embeddings that come later, with `set_embeddings`. The engine computes the prompt up to their
        placeholder meanwhile. Requests of different `cache_salt` share nothing in the prefix cache, however equal their
        prompts are. Requests of a lower `priority` go first. With `lora` the adapter answers, which is read from its
        folder if it is not in memory. Where it cannot be read, an output of `step` has the LoraError.

        Raises InvalidRequestError for a request that can never run: for embeddings of a wrong shape, for a prompt or
        answer that the context has no room for, for tokens outside the vocabulary, and for a grammar that cannot be
        compiled. Raises ValueError for a `request_id` that is in the engine already, and for an adapter where
        `max_loras` is 0. A grammar that `grammar_compiler` has compiled before takes no time here. Any thread may use
        that compiler.
        """
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is in the engine already")
        if lora is not None and self._adapters is None:
            raise ValueError(f"no adapters are served, as {lora.name!r}: max_loras is 0")
        items = make_items(prompt, embeddings, self._runner.embedding_size)
        check_room(len(prompt.prompt_token_ids), params, self.max_model_len)
        layout = self._runner.prompt_layout(prompt)
        check_spans(layout, self._runner.max_span_tokens)
        shares_prefix = self._config.prefix_caching and layout.is_prefix_cacheable
        root = shared_root(cache_salt, lora) if shares_prefix else private_root()
        states = self._sampler_states(prompt, self._with_defaults(params))
        request = Request(prompt, items, {})
        sequences = request.make_sequences(
            request_id, params, layout, prefix_root=root, max_model_len=self.max_model_len, priority=priority, lora=lora
        )
        for sequence, state in zip(sequences, states, strict=True):
            if arrival is not None:
                sequence.times.arrival = arrival
            # A mask of a grammar takes time on other threads, one for each token.
            # By default only where a row has the same bits alone and among others, which adapters' products have not.
            looks_up = self._looks_up and (lora is None or self._config.prompt_lookup)
            if looks_up and state.matcher is None:
                sequence.lookup = PromptLookup(sequence.token_ids, self._runner.vocab_size)
            request.answers[sequence] = AnswerState(
                state, self.make_detokenizer(params, prompt) if params.stop else None
            )
            self._scheduler.add(sequence)
        self._requests[request_id] = request
        self._is_stalled = False

    def make_detokenizer(self, params: SamplingParams, prompt: ProcessedPrompt) -> Detokenizer:
        """Returns a detokenizer for one answer to `prompt`.

        The engine's outputs hold token ids only, so that the caller can turn them into text while the next step
        runs."""
        return Detokenizer(
            self._decoders[params.skip_special_tokens],
            params.stop,
            includes_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            before=prompt.prompt_token_ids if prompt.is_continued else (),
        )

    @property
    def stage_embeddings(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What returns a copy of an item's embeddings in memory from which steps take them the fastest, or None where
        they take them as they are. The copy takes some milliseconds for a large picture. Any thread may make it."""
        return self._runner.stage_embeddings if self._runner.stages_embeddings else None

    def set_embeddings(self, request_id: str, index: int, embeddings: torch.Tensor) -> None:
        """Hands in the embeddings of item `index`, (num_embeds, embedding_size). Does nothing for a request that is
        done or unknown.

        Raises InvalidRequestError for a wrong shape. The request then still waits for the embeddings."""
        if request_id not in self._requests:
            return
        request = self._requests[request_id]
        check_embeddings(index, request.prompt.placeholders[index], embeddings, self._runner.embedding_size)
        request.items[index].embeddings = embeddings
        self._is_stalled = False

    def abort(self, request_id: str) -> None:
        """Ends a request and frees all that it holds. Does nothing for a request that is done or unknown."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._finish_all(request, FinishReason.ABORT)
            self._is_stalled = False
            self._check_nothing_is_left()

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished()

    @property
    def is_idle(self) -> bool:
        """Returns whether a step would do nothing until the next request, embeddings or adapter come."""
        is_stalled = self._is_stalled and not (self._adapters is not None and self._adapters.has_news)
        return is_stalled or not self._scheduler.has_unfinished()

    def call_when_adapter_read(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, on another thread, when an adapter has been read for which the engine may be idle."""
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
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns its outputs. A step that fails ends the requests in it with `ERROR`, and the other
        requests go on.

        Raises torch.AcceleratorError and RankDiedError, after which no step can succeed. Steps are somewhat faster on a
        thread that is in `torch.inference_mode` all the time.
        """
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.step()
        self._clock.start()
        failed = [] if self._adapters is None else self._place_adapters(self._adapters)
        with self._clock.part("schedule"):
            chunks = self._scheduler.schedule()
        self._late_masks.forget_gone()
        self._is_stalled = not chunks and not self._late_masks
        if self._is_stalled:
            return failed
        late = self._late_masks.sequences
        try:
            outputs = self._run(chunks)
        except (torch.AcceleratorError, RankDiedError):
            raise  # the device itself or another rank has failed: every later step would, too
        except Exception:
            request_ids = [one.request_id for one in [*(chunk.sequence for chunk in chunks), *late]]
            logger.exception("step failed for requests %s", request_ids)
            outputs = [output for request_id in request_ids for output in self._fail(request_id)]
        self._check_nothing_is_left()
        self._clock.end()
        self._scheduler.note_step(chunks, self._clock.step_seconds)
        return failed + outputs

    def _place_adapters(self, adapters: LoraAdapters) -> list[RequestOutput]:
        """Gives waiting sequences their adapters. Ends the requests whose adapter cannot be read, and returns their
        outputs."""
        failures = adapters.place(self._scheduler.waiting, self._scheduler.running)
        if not failures:
            return []
        failed = {one.request_id: failures[one.lora] for one in self._scheduler.waiting if one.lora in failures}
        return [output for request_id, error in failed.items() for output in self._fail(request_id, error)]

    def check_integrity(self) -> None:
        """Raises RuntimeError when a block of the KV cache was lost, or when its reference count is wrong."""
        self._block_manager.check_integrity([*self._scheduler.running, *self._scheduler.waiting])

    def _check_nothing_is_left(self) -> None:
        """Raises RuntimeError when no sequence is unfinished and yet a block or a request is held. The check is cheap
        enough for every step."""
        if not self._scheduler.has_unfinished() and (self._block_manager.usage or self._requests):
            raise RuntimeError(
                f"idle with {self._block_manager.usage:.1%} of the KV cache, {len(self._requests)} requests"
            )

    def _run(self, chunks: list[ScheduledChunk]) -> list[RequestOutput]:
        sampling, logits = self._compute(chunks)
        outputs = [self._end_without_tokens(chunk.sequence) for chunk in chunks if chunk.is_last and not chunk.samples]
        if logits is None or not any(chunk.draft for chunk in chunks):
            return outputs + self._sample(*self._late_masks.exchange(sampling, logits))
        first_rows = _first_rows(chunks)
        outputs += self._sample(*self._late_masks.exchange(sampling, logits[list(first_rows.values())]))
        return outputs + self._check_drafts([(chunk, row) for chunk, row in first_rows.items() if chunk.draft], logits)

    def _sample(self, sampling: Sampling, logits: torch.Tensor | None) -> list[RequestOutput]:
        """Chooses the next token of each answer, by `logits` (answers, vocab), float32."""
        if logits is None:
            return []
        outputs = []
        with self._clock.part("sample"):
            tokens = sample(logits, [answer.sampler_state for _, answer in sampling])
        for (sequence, answer), token in zip(sampling, tokens, strict=True):
            if token is None:
                outputs += self._fail(sequence.request_id, answer.sampler_state.failure)
            elif sequence.finish_reason is None:
                outputs.append(self._advance(sequence, answer, token))
        return outputs

    def _check_drafts(self, drafted: list[tuple[ScheduledChunk, int]], logits: torch.Tensor) -> list[RequestOutput]:
        """Goes on with the answers whose sampled token is the guessed one, whose successor has been computed, too.

        `drafted`: the chunks with guesses, each with the row in `logits` of the token before the guesses."""
        outputs, right, depth = [], drafted, 0
        while right:
            right = [
                (chunk, row)
                for chunk, row in right
                if depth < len(chunk.draft)
                and chunk.sequence.finish_reason is None
                and chunk.sequence.token_ids[-1] == chunk.draft[depth]
            ]
            depth += 1
            self._num_accepted_tokens += len(right)
            for chunk, _ in right:
                self._note_computed(chunk.sequence, chunk.end + depth)
            sampling = [(chunk.sequence, self._answer(chunk.sequence)) for chunk, _ in right]
            outputs += self._sample(sampling, logits[[row + depth for _, row in right]] if right else None)
        for chunk, _ in drafted:
            self._num_draft_tokens += len(chunk.draft)
            if chunk.sequence.lookup is not None and chunk.sequence.finish_reason is None:
                chunk.sequence.lookup.learn(len(chunk.draft), chunk.sequence.num_computed_tokens - chunk.end)
        return outputs

    def _compute(self, chunks: list[ScheduledChunk]) -> tuple[Sampling, torch.Tensor | None]:
        """Computes the chunks and returns the answers to sample a token for. The logits, (rows, vocab), float32, have a
        row for each of them, and behind it one for each guess."""
        if not chunks:
            return [], None
        with self._clock.part("model"):
            result = self._runner.run(chunks)
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(chunks, result.prompt_logprobs)
        for chunk in chunks:
            self._note_computed(chunk.sequence, chunk.end)
        sampling = [(chunk.sequence, self._answer(chunk.sequence)) for chunk in chunks if chunk.samples]
        return sampling, result.logits

    def _note_computed(self, sequence: Sequence, end: int) -> None:
        """Notes that the cache holds the sequence up to `end`."""
        num_full = sequence.num_computed_tokens // self._config.block_size
        sequence.num_computed_tokens = end
        if end // self._config.block_size > num_full:
            self._block_manager.commit(sequence)

    def _keep_prompt_logprobs(self, chunks: list[ScheduledChunk], prompt_logprobs: list[TokenLogprobs]) -> None:
        told = iter(prompt_logprobs)
        for chunk in chunks:
            if scored := chunk.scored_tokens:
                self._answer(chunk.sequence).prompt_logprobs.extend(islice(told, len(scored)))
                chunk.sequence.num_scored_tokens = chunk.start + scored.stop

    def _answer(self, sequence: Sequence) -> AnswerState:
        return self._requests[sequence.request_id].answers[sequence]

    def _sampler_states(self, prompt: ProcessedPrompt, params: SamplingParams) -> list[SamplerState]:
        wanted = params.structured_output
        grammar = None if wanted is None else self.grammar_compiler.compile(wanted)
        excluded = ExcludedTokens.of(params, self.byte_tokenizer, self._runner.vocab_size)
        return [
            SamplerState(
                params,
                prompt.prompt_token_ids,
                vocab_size=self._runner.vocab_size,
                eos_token_ids=self._eos_token_ids,
                grammar=grammar,
                excluded=excluded,
                index=index,
            )
            for index in range(params.n)
        ]

    def _with_defaults(self, params: SamplingParams) -> SamplingParams:
        unset = {name: value for name, value in self._default_sampling.items() if getattr(params, name) is None}
        return replace(params, **unset)

    def _advance(self, sequence: Sequence, answer: AnswerState, token: SampledToken) -> RequestOutput:
        """Appends a sampled token, ends the sequence where it is complete, and returns the output for the token."""
        sequence.append_token(token.token_id)
        is_stop_token = token.token_id in answer.sampler_state.stop_token_ids
        reason = None
        if is_stop_token or answer.is_complete_with(token.token_id):
            reason = FinishReason.STOP
        elif sequence.num_tokens >= sequence.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._scheduler.finish(sequence, reason)
            self._forget(sequence)
        output = RequestOutput.of(sequence, token, has_stop_token=is_stop_token)
        if output.num_output_tokens == 1:
            output.prompt_logprobs = answer.prompt_logprobs
        return output

    def _end_without_tokens(self, sequence: Sequence) -> RequestOutput:
        """Ends a sequence that was to compute its prompt only, and returns its output."""
        prompt_logprobs = self._answer(sequence).prompt_logprobs
        self._scheduler.finish(sequence, FinishReason.LENGTH)
        self._forget(sequence)
        return replace(RequestOutput.of(sequence, None), prompt_logprobs=prompt_logprobs)

    def _forget(self, sequence: Sequence) -> None:
        answers = self._requests[sequence.request_id].answers
        del answers[sequence]
        if not answers:
            del self._requests[sequence.request_id]

    def _fail(self, request_id: str, error: InvalidRequestError | LoraError | None = None) -> list[RequestOutput]:
        """Ends all answers of a request with `ERROR` and returns their outputs, or none for a request that has ended.

        `error` says what the client has to change, where the request itself has caused the failure, or what is wrong
        with its adapter."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        for sequence in request.answers:
            self._block_manager.disown(sequence)
        outputs = self._finish_all(request, FinishReason.ERROR)
        return [replace(output, error=error) for output in outputs]

    def _finish_all(self, request: Request, reason: FinishReason) -> list[RequestOutput]:
        for sequence in request.answers:
            self._scheduler.finish(sequence, reason)
        return [RequestOutput.of(sequence, None) for sequence in request.answers]


def _step_budget(config: EngineConfig, runner: ModelRunner) -> StepBudget:
    return StepBudget(
        max_decode_slowdown=config.max_decode_slowdown,
        target_seconds=None if config.target_step_ms is None else config.target_step_ms / 1e3,
        num_threads=runner.num_prompt_threads,
    )


def _first_rows(chunks: Seq[ScheduledChunk]) -> dict[ScheduledChunk, int]:
    """Returns the row of the logits behind each chunk that samples. The rows behind its guesses follow."""
    sampling = [chunk for chunk in chunks if chunk.samples]
    ends = accumulate(1 + len(chunk.draft) for chunk in sampling)
    return {chunk: end - 1 - len(chunk.draft) for chunk, end in zip(sampling, ends, strict=True)}
