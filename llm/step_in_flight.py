"""Steps between their launch and the reading of their tokens.

With asynchronous scheduling the host schedules and launches a step while a GPU still computes the previous one:

    host: launch step 2   read step 1   choose step 2   launch step 3   read step 2   choose step 3
    GPU:  step 1 ....................   step 2 ......................   step 3 ......................

`launch` launches the model, on the previous step's tokens, which are still on the device. `read` then waits for these
tokens and advances their answers. `choose` launches the choice of the next tokens after that, because penalties and
grammars need all earlier tokens. None of these waits for the step just launched.

A sequence may end by a read token or an abort after its row of the next step has been launched. No token is chosen or
read for such a row. The sequence's blocks are free at once, and another sequence may get them before the device has
written to them. This is safe:

- The device works in order. Other sequences write to the blocks later, and read only positions that they have written.
- The row writes only to the position after the sequence's end. The block of that position is not in the prefix cache:
  only full blocks of known tokens of continuing sequences enter it."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, islice

import numpy as np
import torch

from raylens.llm.answers import Answers
from raylens.llm.block_manager import BlockManager
from raylens.llm.host_values import send
from raylens.llm.late_masks import LateMasks, Sampling
from raylens.llm.model_runner import ModelRunner
from raylens.llm.outputs import RequestOutput
from raylens.llm.sampling.sampler import ChosenTokens, choose
from raylens.llm.sampling.truncation import waits_for_device
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence
from raylens.llm.step_clock import StepClock
from raylens.llm.step_input import StepOutput


@dataclass(slots=True)
class StepInFlight:
    """A launched step.

    `chunks`: the first `num_decodes` of them decode. `launched_at`: the start of its scheduling, in seconds of
    `time.perf_counter`. `is_scored`: whether the host has waited for its results of prompts. `logits`: (rows,
    vocab), float32, a row for each chunk that samples, followed by a row for each of its guesses; None when not needed.
    `sampling`: the answers that get a token. `tokens`: their tokens, in this order; None: not chosen yet."""

    chunks: list[ScheduledChunk]
    num_decodes: int
    launched_at: float
    is_scored: bool = False
    logits: torch.Tensor | None = None
    sampling: Sampling = field(default_factory=list)
    tokens: ChosenTokens | None = None

    @property
    def must_be_read(self) -> bool:
        """Returns whether the host reads the step before it schedules the next one: guessing needs the tokens, and a
        step that the host has already waited for costs nothing to read."""
        return self.is_scored or any(
            sequence.lookup is not None or waits_for_device(answer.sampler_state) for sequence, answer in self.sampling
        )

    @property
    def sequences(self) -> list[Sequence]:
        return [*(chunk.sequence for chunk in self.chunks), *(sequence for sequence, _ in self.sampling)]


class StepLauncher:
    """Launches steps and reads their results."""

    def __init__(self, runner: ModelRunner, block_manager: BlockManager, answers: Answers, clock: StepClock) -> None:
        self._runner = runner
        self._block_manager = block_manager
        self._answers = answers
        self._clock = clock
        self.late_masks = LateMasks()
        self.num_draft_tokens = self.num_accepted_tokens = 0

    def launch(self, chunks: list[ScheduledChunk], num_decodes: int, before: StepInFlight | None) -> StepInFlight:
        """Launches the computation of the chunks. `before`: the previous step, with chosen tokens that are not read."""
        if not chunks:
            return StepInFlight(chunks, num_decodes, self._clock.started)
        chosen = None if before is None or before.tokens is None else before.tokens.token_ids
        with self._clock.part("model"):
            result = self._runner.run(chunks, chosen)
        if is_scored := bool(result.prompt_logprobs or result.pooled):
            self._note_scores(chunks, result)
        for chunk in chunks:
            self._block_manager.note_computed(chunk.sequence, chunk.end)
        return StepInFlight(chunks, num_decodes, self._clock.started, is_scored, result.logits)

    def _note_scores(self, chunks: list[ScheduledChunk], result: StepOutput) -> None:
        told, pooled = iter(result.prompt_logprobs), iter(result.pooled)
        for chunk in chunks:
            answer = self._answers.of(chunk.sequence)
            if scored := chunk.scored_tokens:
                answer.prompt_logprobs.extend(islice(told, len(scored)))
            if taken := chunk.pooled_tokens:
                answer.pooled.append(next(pooled))
            if read := scored or taken:
                chunk.sequence.num_scored_tokens = chunk.start + read.stop

    def choose(self, step: StepInFlight) -> None:
        """Launches the choice of the next tokens, also for waiting answers whose masks are ready now."""
        rows = _first_rows(step.chunks)
        going_on = {chunk: row for chunk, row in rows.items() if not chunk.sequence.is_finished}
        has_drafts = any(chunk.draft for chunk in going_on)
        logits = step.logits
        if logits is not None and (has_drafts or len(going_on) < len(rows)):
            logits = logits[send(np.array([*going_on.values()], dtype=np.int64), logits.device)]
        if not has_drafts:
            step.logits = None  # frees the memory for the next step
        sampling = [(chunk.sequence, self._answers.of(chunk.sequence)) for chunk in going_on]
        step.sampling, logits = self.late_masks.exchange(sampling, logits)
        step.tokens = self._choose(step.sampling, logits)

    def read(self, step: StepInFlight) -> Iterator[RequestOutput]:
        """Waits for the step's tokens and yields the outputs of its answers, aborted ones left out."""
        yield from self._take(step.sampling, step.tokens)
        for chunk in step.chunks:
            if chunk.is_last and not chunk.samples and not chunk.sequence.is_finished:
                yield self._answers.end_without_tokens(chunk.sequence)
        if step.logits is not None:
            drafted = [(chunk, row) for chunk, row in _first_rows(step.chunks).items() if chunk.draft]
            yield from self._check_drafts(drafted, step.logits)

    def _choose(self, sampling: Sampling, logits: torch.Tensor | None) -> ChosenTokens | None:
        """Launches the choice of each answer's next token, by `logits` (answers, vocab), float32. The result for an
        empty batch serves as a fence: it keeps at most two steps queued on the device."""
        if logits is None:
            return None
        with self._clock.part("sample"):
            tokens = choose(logits, [answer.sampler_state for _, answer in sampling])
        for row, (sequence, _) in enumerate(sampling):
            sequence.add_pending_token(row)
        return tokens

    def _take(self, sampling: Sampling, tokens: ChosenTokens | None) -> list[RequestOutput]:
        """Reads the tokens of these answers and advances the answers that have not been aborted since."""
        if tokens is None:
            return []
        outputs = []
        with self._clock.part("sample"):
            read = tokens.read()
        for (sequence, answer), token in zip(sampling, read, strict=True):
            sequence.num_pending_tokens -= 1
            if sequence.is_finished:
                continue
            if token is None:
                outputs += self._answers.fail(sequence.request_id, answer.sampler_state.failure)
            else:
                outputs.append(self._answers.advance(sequence, answer, token))
        return outputs

    def _check_drafts(self, drafted: list[tuple[ScheduledChunk, int]], logits: torch.Tensor) -> Iterator[RequestOutput]:
        """Advances the answers whose sampled token equals the guess: the logits of the next token are computed already.
        `drafted`: the chunks with guesses, each with the row in `logits` of the token before the guesses."""
        right, depth = drafted, 0
        while right:
            right = [
                (chunk, row)
                for chunk, row in right
                if depth < len(chunk.draft)
                and chunk.sequence.finish_reason is None
                and chunk.sequence.token_ids[-1] == chunk.draft[depth]
            ]
            depth += 1
            self.num_accepted_tokens += len(right)
            for chunk, _ in right:
                self._block_manager.note_accepted(chunk.sequence, chunk.end + depth)
            sampling = [(chunk.sequence, self._answers.of(chunk.sequence)) for chunk, _ in right]
            rows = logits[[row + depth for _, row in right]] if right else None
            yield from self._take(sampling, self._choose(sampling, rows))
        for chunk, _ in drafted:
            self._block_manager.end_draft(chunk.sequence)
            self.num_draft_tokens += len(chunk.draft)
            if chunk.sequence.lookup is not None and chunk.sequence.finish_reason is None:
                chunk.sequence.lookup.learn(len(chunk.draft), chunk.sequence.num_computed_tokens - chunk.end)


def _first_rows(chunks: Seq[ScheduledChunk]) -> dict[ScheduledChunk, int]:
    """Returns the first row of the logits of each chunk that samples. The rows of its guesses follow."""
    sampling = [chunk for chunk in chunks if chunk.samples]
    ends = accumulate(1 + len(chunk.draft) for chunk in sampling)
    return {chunk: end - 1 - len(chunk.draft) for chunk, end in zip(sampling, ends, strict=True)}
