"""Keeps the unfinished answers of all requests: appends sampled tokens and ends answers."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from raylens.llm.block_manager import BlockManager
from raylens.llm.lora.request import LoraError
from raylens.llm.outputs import RequestOutput
from raylens.llm.request import AnswerState, Request
from raylens.llm.sampling.sampler import SampledToken
from raylens.llm.scheduler import Scheduler
from raylens.llm.sequence import FinishReason, Sequence
from raylens.preprocess.schema import InvalidRequestError


class Answers:
    """The unfinished `requests` by their ids, each with its unfinished answers."""

    def __init__(self, scheduler: Scheduler, block_manager: BlockManager) -> None:
        self._scheduler = scheduler
        self._block_manager = block_manager
        self.requests: dict[str, Request] = {}

    def of(self, sequence: Sequence) -> AnswerState:
        return self.requests[sequence.request_id].answers[sequence]

    def advance(self, sequence: Sequence, answer: AnswerState, token: SampledToken) -> RequestOutput:
        """Appends a sampled token, ends a complete sequence, and returns the output for the token."""
        sequence.append_token(token.token_id)
        is_stop_token = token.token_id in answer.sampler_state.stop_token_ids
        reason = None
        if is_stop_token or answer.is_complete_with(token.token_id):
            reason = FinishReason.STOP
        elif len(sequence.token_ids) >= sequence.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            self._block_manager.note_known(sequence)
        else:
            self._end(sequence, reason)
        output = RequestOutput.of(sequence, token, has_stop_token=is_stop_token)
        if output.num_output_tokens == 1:
            output.prompt_logprobs = answer.prompt_logprobs
        return output

    def end_without_tokens(self, sequence: Sequence) -> RequestOutput:
        """Ends a sequence whose request asks for its prompt only, and returns its output."""
        prompt_logprobs = self.of(sequence).prompt_logprobs
        self._end(sequence, FinishReason.LENGTH)
        return replace(RequestOutput.of(sequence, None), prompt_logprobs=prompt_logprobs)

    def fail(self, request_id: str, error: InvalidRequestError | LoraError | None = None) -> list[RequestOutput]:
        """Ends all answers of a request with `ERROR` and returns their outputs, or none for a request that has ended.

        `error`: the cause, if it lies in the request or its adapter. The client reads it."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return []
        for sequence in request.answers:
            self._block_manager.disown(sequence)
        outputs = self._finish(request.answers, FinishReason.ERROR)
        return [replace(output, error=error) for output in outputs]

    def fail_all(self, sequences: Seq[Sequence]) -> list[RequestOutput]:
        """Ends the requests of all these sequences with `ERROR` and returns their outputs."""
        request_ids = dict.fromkeys(sequence.request_id for sequence in sequences if not sequence.is_finished)
        return [output for request_id in request_ids for output in self.fail(request_id)]

    def abort(self, request_id: str) -> bool:
        """Ends all answers of a request. Returns False for a request that has ended or is unknown."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        self._finish(request.answers, FinishReason.ABORT)
        return True

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(sequence, reason)
        answers = self.requests[sequence.request_id].answers
        del answers[sequence]
        if not answers:
            del self.requests[sequence.request_id]

    def _finish(self, answers: dict[Sequence, AnswerState], reason: FinishReason) -> list[RequestOutput]:
        for sequence in answers:
            self._scheduler.finish(sequence, reason)
        return [RequestOutput.of(sequence, None) for sequence in answers]
