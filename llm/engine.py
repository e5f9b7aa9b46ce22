"""The LLM engine: `add_request`, then `step` until `has_unfinished` is false. Synchronous, one thread.

A step is `schedule`, `run`, `sample`, and what comes of it for each request.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from llm.block_manager import BlockManager
from llm.config import EngineConfig
from llm.detokenizer import Detokenizer
from llm.model_runner import ModelRunner
from llm.parallel import ProcessGroup, RankDiedError
from llm.sampler import sample
from llm.sampling_params import SamplingParams
from llm.scheduler import Scheduler
from llm.sequence import FinishReason, PromptItem, Sequence, SequenceTimes
from preprocess.schema import InvalidRequestError, ProcessedPrompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step adds to one request; `finish_reason` is set on its last one."""

    request_id: str
    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None
    times: SequenceTimes


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counts of sequences, share of KV blocks in use (0 to 1), preemptions since the start."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int


class LLMEngine:
    """Continuous batching over a paged KV cache. Requests join and leave between any two steps."""

    def __init__(self, config: EngineConfig, group: ProcessGroup | None = None) -> None:
        self._runner = ModelRunner(config, group)
        self._block_manager = BlockManager(self._runner.num_blocks, config.block_size)
        self._scheduler = Scheduler(self._block_manager, config.max_num_seqs, config.max_num_batched_tokens)
        self._tokenizer = AutoTokenizer.from_pretrained(config.model, revision=config.revision)
        generation = _generation_config(config)
        self._eos_token_ids = _eos_token_ids(generation, self._tokenizer.eos_token_id)
        self._default_sampling = _default_sampling(generation)
        _warn_of_ignored_settings(generation)
        self._device = config.device
        self._sequences: dict[str, tuple[Sequence, Detokenizer]] = {}
        self.max_model_len = config.max_model_len or self._runner.max_position_embeddings
        self.max_model_len = min(self.max_model_len, self._runner.num_blocks * config.block_size)

    def add_request(
        self, request_id: str, prompt: ProcessedPrompt, embeddings: Seq[torch.Tensor], params: SamplingParams
    ) -> None:
        """Queues a request; `embeddings[i]`, (num_embeds, hidden_size), fills `prompt.placeholders[i]`.

        Raises InvalidRequestError when it can never run: embeddings of a wrong shape, no room in the context.
        """
        if request_id in self._sequences:
            raise ValueError(f"request {request_id} is in the engine already")
        items = self._check_items(prompt, embeddings)
        num_prompt_tokens = len(prompt.prompt_token_ids)
        self._check_room(num_prompt_tokens, params)
        params = self._with_defaults(params)
        sequence = Sequence(
            request_id=request_id,
            token_ids=list(prompt.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            items=items,
            layout=self._runner.prompt_layout(prompt),
            sampling_params=params,
            max_num_tokens=num_prompt_tokens + (params.max_tokens or self.max_model_len - num_prompt_tokens),
        )
        if params.seed is not None:
            sequence.generator = torch.Generator(self._device).manual_seed(params.seed)
        self._sequences[request_id] = (sequence, Detokenizer(self._tokenizer, params.stop))
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees what it holds; does nothing for one that is done or unknown."""
        entry = self._sequences.pop(request_id, None)
        if entry is not None:
            entry[0].finish(FinishReason.ABORT)
            self._scheduler.remove_finished()

    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished()

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_cache_usage=self._block_manager.usage,
            num_preemptions=self._scheduler.num_preemptions,
        )

    def step(self) -> list[RequestOutput]:
        """Runs one step. A step that fails ends the requests in it, with `ERROR`; the others go on."""
        chunks = self._scheduler.schedule()
        if not chunks:
            return []
        try:
            logits = self._runner.run(chunks)
            sampling = [chunk.sequence for chunk in chunks if chunk.samples]
            token_ids = sample(logits, sampling, self._eos_token_ids)
        except (torch.AcceleratorError, RankDiedError):
            raise  # the device itself or another rank has failed: every later step would, too
        except Exception:
            logger.exception("step failed for requests %s", [chunk.sequence.request_id for chunk in chunks])
            outputs = [self._fail(chunk.sequence) for chunk in chunks]
            self._scheduler.remove_finished()
            return outputs
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
        outputs = [
            self._fail(sequence) if token_id is None else self._advance(sequence, token_id)
            for sequence, token_id in zip(sampling, token_ids, strict=True)
        ]
        self._scheduler.remove_finished()
        return outputs

    def check_integrity(self) -> None:
        """Raises RuntimeError when a block was lost or is held twice."""
        self._block_manager.check_integrity([*self._scheduler.running, *self._scheduler.waiting])

    def _with_defaults(self, params: SamplingParams) -> SamplingParams:
        unset = {name: value for name, value in self._default_sampling.items() if getattr(params, name) is None}
        return replace(params, **unset)

    def _check_room(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        if not 0 < num_prompt_tokens < self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens, the context of {self.max_model_len} tokens"
                " has to hold it and an answer",
                field="messages",
                code="context_length_exceeded",
            )
        for field, num_tokens in (("max_tokens", params.max_tokens or 0), ("min_tokens", params.min_tokens)):
            if num_prompt_tokens + num_tokens > self.max_model_len:
                raise InvalidRequestError(
                    f"{num_tokens} and the prompt's {num_prompt_tokens} tokens are more than the context of"
                    f" {self.max_model_len} tokens",
                    field=field,
                    code="context_length_exceeded",
                )

    def _check_items(self, prompt: ProcessedPrompt, embeddings: Seq[torch.Tensor]) -> list[PromptItem]:
        if len(embeddings) != len(prompt.placeholders):
            raise InvalidRequestError(
                f"{len(prompt.placeholders)} placeholders but {len(embeddings)} items",
                field="messages",
            )
        items = []
        for placeholder, mm_hash, item in zip(prompt.placeholders, prompt.mm_hashes, embeddings, strict=True):
            expected = (placeholder.num_embeds, self._runner.embedding_size)
            if tuple(item.shape) != expected:
                raise InvalidRequestError(
                    f"item embeddings of shape {tuple(item.shape)}, expected {expected}",
                    field="messages",
                )
            items.append(PromptItem.at(placeholder, mm_hash, item))
        return items

    def _advance(self, sequence: Sequence, token_id: int) -> RequestOutput:
        """Appends a sampled token, decides whether the sequence ends, and says what that adds to its output."""
        _, detokenizer = self._sequences[sequence.request_id]
        sequence.append_token(token_id)
        is_eos = token_id in self._eos_token_ids and not sequence.sampling_params.ignore_eos
        text = "" if is_eos else detokenizer.append([token_id])
        if is_eos or detokenizer.stopped:
            sequence.finish(FinishReason.STOP)
        elif sequence.num_tokens >= sequence.max_num_tokens:
            sequence.finish(FinishReason.LENGTH)
        if sequence.is_finished:
            text += "" if detokenizer.stopped else detokenizer.flush()
            del self._sequences[sequence.request_id]
        return _output(sequence, text, [token_id])

    def _fail(self, sequence: Sequence) -> RequestOutput:
        sequence.finish(FinishReason.ERROR)
        del self._sequences[sequence.request_id]
        return _output(sequence, "", [])


def _output(sequence: Sequence, text: str, token_ids: list[int]) -> RequestOutput:
    return RequestOutput(
        request_id=sequence.request_id,
        text=text,
        token_ids=token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        finish_reason=sequence.finish_reason,
        times=sequence.times,
    )


def _generation_config(config: EngineConfig) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(config.model, revision=config.revision)
    except OSError:
        return GenerationConfig()


def _default_sampling(generation: GenerationConfig) -> dict[str, Any]:
    """What a request that does not say gets: sampling as the model's authors set it, else greedy."""
    if not generation.do_sample:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    return {
        "temperature": 1.0 if generation.temperature is None else generation.temperature,
        "top_p": 1.0 if generation.top_p is None else generation.top_p,
        "top_k": 50 if generation.top_k is None else generation.top_k,  # transformers' default when it samples
    }


# Settings of a generation config that change which tokens HF `generate` chooses and that are not honoured here.
_IGNORED_SETTINGS = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "suppress_tokens",
    "bad_words_ids",
    "min_p",
    "typical_p",
)


def _warn_of_ignored_settings(generation: GenerationConfig) -> None:
    neutral: tuple[object, ...] = (None, 0, 1, 1.0, [], ())
    ignored = {name: getattr(generation, name, None) for name in _IGNORED_SETTINGS}
    if changed := {name: value for name, value in ignored.items() if value not in neutral}:
        logger.warning("the model's generation config asks for %s, which is not supported and ignored", changed)


def _eos_token_ids(generation: GenerationConfig, tokenizer_eos: int | None) -> frozenset[int]:
    """The model's end tokens: of its generation config, else of its tokenizer."""
    eos = tokenizer_eos if generation.eos_token_id is None else generation.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
