"""The unfinished answers of all requests: appends sampled tokens and ends answers."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from raylens.llm.block_manager import BlockManager
from raylens.llm.detokenizer import Detokenizer
from raylens.llm.lora.request import LoraError
from raylens.llm.outputs import RequestOutput
from raylens.llm.pooler import Pooler
from raylens.llm.request_checks import check_embeddings
from raylens.llm.sampling.logprobs import TokenLogprobs
from raylens.llm.sampling.sampler import SampledToken
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.llm.scheduler import Scheduler
from raylens.llm.sequence import FinishReason, PromptItem, Sequence
from raylens.preprocess.schema import InvalidRequestError, ProcessedPrompt


@dataclass(frozen=True, slots=True)
class AnswerState:
    """The state of one unfinished answer.

    `text`: None if no stop string can end it. `prompt_logprobs`: of the prompt's tokens so far, if they are asked
    for. `pooled`: the parts of the pooled prompt so far."""

    sampler_state: SamplerState
    text: Detokenizer | None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: list[torch.Tensor] = field(default_factory=list)

    def is_complete_with(self, token_id: int) -> bool:
        """Takes the answer's next token. Returns whether a stop string or the structured output is now complete."""
        if self.text is not None:
            self.text.append([token_id])
            if self.text.stopped:
                return True
        return self.sampler_state.is_complete


@dataclass(frozen=True, slots=True)
class Request:
    """A request with its unfinished `answers`. All answers share the prompt's `items`."""

    prompt: ProcessedPrompt
    items: list[PromptItem]
    answers: dict[Sequence, AnswerState] = field(default_factory=dict)


def make_items(prompt: ProcessedPrompt, embeddings: Seq[torch.Tensor | None], embedding_size: int) -> list[PromptItem]:
    """Returns the prompt's items; embeddings of None arrive later. Raises InvalidRequestError if some do not fit."""
    if len(embeddings) != len(prompt.placeholders):
        raise InvalidRequestError(
            f"{len(prompt.placeholders)} placeholders but {len(embeddings)} items", field="messages"
        )
    for index, (placeholder, item) in enumerate(zip(prompt.placeholders, embeddings, strict=True)):
        if item is not None:
            check_embeddings(index, placeholder, item, embedding_size)
    positions = [placeholder.embed_positions() for placeholder in prompt.placeholders]
    return [PromptItem(*item) for item in zip(prompt.mm_hashes, positions, embeddings, strict=True)]


class Answers:
    """The unfinished `requests` by their ids, each with its unfinished answers."""

    def __init__(self, scheduler: Scheduler, block_manager: BlockManager, pooler: Pooler | None = None) -> None:
        self._pooler = pooler
        self._scheduler = scheduler
        self._block_manager = block_manager
        self.requests: dict[str, Request] = {}

    def of(self, sequence: Sequence) -> AnswerState:
        return self.requests[sequence.request_id].answers[sequence]

    def advance(self, sequence: Sequence, answer: AnswerState, token: SampledToken) -> RequestOutput:
        """Appends a sampled token, ends a complete sequence, and returns the output for the token."""
        sequence.append_token(token.token_id)
        is_stop_token = token.token_id in answer.sampler_state.stop_token_ids
        if is_stop_token or answer.is_complete_with(token.token_id):
            self._end(sequence, FinishReason.STOP)
        elif len(sequence.token_ids) >= sequence.max_num_tokens or answer.sampler_state.is_repeating:
            self._end(sequence, FinishReason.LENGTH)
        else:
            self._block_manager.note_known(sequence)
        output = RequestOutput.of(sequence, token, has_stop_token=is_stop_token)
        if output.num_output_tokens == 1:
            output.prompt_logprobs = answer.prompt_logprobs
        return output

    def end_without_tokens(self, sequence: Sequence) -> RequestOutput:
        """Ends a sequence whose request asks for its prompt only, and returns its output."""
        answer = self.of(sequence)
        if sequence.pooled_from is None or self._pooler is None:
            self._end(sequence, FinishReason.LENGTH)
            return RequestOutput.of(sequence, prompt_logprobs=answer.prompt_logprobs)
        pooled = self._pooler.result(answer.pooled, sequence.num_prompt_tokens - sequence.pooled_from)
        sequence.times.first_token = time.perf_counter()  # the end of its prefill
        self._end(sequence, FinishReason.STOP)
        return RequestOutput.of(sequence, pooled=pooled)

    def fail(self, request_id: str, error: InvalidRequestError | LoraError | None = None) -> list[RequestOutput]:
        """Ends all answers of a request with `ERROR` and returns their outputs, or none for a request that has ended.
        `error`: the cause, if it lies in the request or its adapter. The client reads it."""
        ended = self._end_all(request_id, FinishReason.ERROR, disowns_blocks=True)
        return [RequestOutput.of(sequence, error=error) for sequence in ended]

    def fail_all(self, sequences: Seq[Sequence]) -> list[RequestOutput]:
        """Ends the requests of all these sequences with `ERROR` and returns their outputs."""
        request_ids = dict.fromkeys(sequence.request_id for sequence in sequences if not sequence.is_finished)
        return [output for request_id in request_ids for output in self.fail(request_id)]

    def abort(self, request_id: str) -> bool:
        """Ends all answers of a request. Returns False for a request that has ended or is unknown."""
        return bool(self._end_all(request_id, FinishReason.ABORT))

    def _end_all(self, request_id: str, reason: FinishReason, *, disowns_blocks: bool = False) -> Seq[Sequence]:
        """Ends a request and returns the sequences that this ends. `disowns_blocks`: see `BlockManager.disown`."""
        request = self.requests.pop(request_id, None)
        sequences = [] if request is None else list(request.answers)
        for sequence in sequences:
            if disowns_blocks:
                self._block_manager.disown(sequence)
            self._scheduler.finish(sequence, reason)
        return sequences

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(sequence, reason)
        answers = self.requests[sequence.request_id].answers
        del answers[sequence]
        if not answers:
            del self.requests[sequence.request_id]
