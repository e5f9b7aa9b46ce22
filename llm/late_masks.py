"""Holds the logits of sequences whose grammar mask is not ready yet, while other sequences step on."""

from typing import TypeAlias

import torch

from raylens.llm.answers import AnswerState
from raylens.llm.sampling.grammar import GrammarMatcher
from raylens.llm.sequence import Sequence

_PATIENCE_SECONDS = 0.005
"""The longest wait of a step for masks before their sequences leave its batch. Most masks take 0.1 ms."""
_IDLE_SECONDS = 0.05
"""The longest wait of an otherwise empty step for masks. New requests and aborts wait behind it."""

Sampling: TypeAlias = list[tuple[Sequence, AnswerState]]


class LateMasks:
    """The waiting sequences, each with a copy of its row of a step's logits, (vocab,)."""

    def __init__(self) -> None:
        self._rows: dict[Sequence, tuple[AnswerState, torch.Tensor]] = {}

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._rows)

    def forget_gone(self) -> None:
        """Drops sequences that have ended or were preempted. A preempted sequence computes its logits again."""
        gone = [one for one in self._rows if one.is_finished or one.num_uncomputed_tokens]
        for sequence in gone:
            del self._rows[sequence]

    def exchange(self, sampling: Sampling, logits: torch.Tensor | None) -> tuple[Sampling, torch.Tensor | None]:
        """Takes a step's sequences and logits, (len(sampling), vocab) or None. Returns the sequences to sample now with
        their logits, in the same form: the step's and the waiting ones whose masks are ready."""
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
            # Cloned, because the next step may overwrite the logits.
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
