"""Sequences that have logits but not yet their grammar's mask: they wait while the others take their next steps."""

from typing import TypeAlias

import torch

from llm.grammar import GrammarMatcher
from llm.request import AnswerState
from llm.sequence import Sequence

_PATIENCE_SECONDS = 0.005
"""Most masks take a tenth of a millisecond: to leave the batch for one that comes in a moment costs more."""
_IDLE_SECONDS = 0.05
"""How long a step that has nothing else to do waits, so that requests that come or go are not kept waiting."""

Sampling: TypeAlias = list[tuple[Sequence, AnswerState]]


class LateMasks:
    """Holds their logits, a copy of a row of the step's (vocab,) each."""

    def __init__(self) -> None:
        self._rows: dict[Sequence, tuple[AnswerState, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._rows)

    def forget_gone(self) -> None:
        """Drops those that have ended or were preempted: these are computed again."""
        gone = [one for one in self._rows if one.is_finished or one.num_uncomputed_tokens]
        for sequence in gone:
            del self._rows[sequence]

    def exchange(self, sampling: Sampling, logits: torch.Tensor | None) -> tuple[Sampling, torch.Tensor | None]:
        """Takes what a step has computed, `logits` (len(sampling), vocab), None where it had nothing to compute; gives
        what can be sampled now, in the same form."""
        late = _matchers([answer for _, answer in sampling if not answer.sampler_state.is_ready])
        if not late and not self._rows:
            return sampling, logits
        if late:
            GrammarMatcher.wait_for(late, _PATIENCE_SECONDS, for_all=True)
        if not sampling:
            GrammarMatcher.wait_for(_matchers([own for own, _ in self._rows.values()]), _IDLE_SECONDS, for_all=False)
        return self._sort(sampling, logits)

    def _sort(self, sampling: Sampling, logits: torch.Tensor | None) -> tuple[Sampling, torch.Tensor | None]:
        rows = [] if logits is None else list(logits)
        candidates = [(sequence, *own) for sequence, own in self._rows.items()]
        candidates += [(*one, row) for one, row in zip(sampling, rows, strict=True)]
        ready = [answer.sampler_state.is_ready for _, answer, _ in candidates]
        self._rows = {
            # The runner writes the next step's logits to the same place.
            sequence: (answer, row if sequence in self._rows else row.clone())
            for (sequence, answer, row), is_ready in zip(candidates, ready, strict=True)
            if not is_ready
        }
        now = [candidate for candidate, is_ready in zip(candidates, ready, strict=True) if is_ready]
        if not now:
            return [], None
        return [(sequence, answer) for sequence, answer, _ in now], torch.stack([row for *_, row in now])


def _matchers(answers: list[AnswerState]) -> list[GrammarMatcher]:
    return [matcher for answer in answers if (matcher := answer.sampler_state.matcher) is not None]
