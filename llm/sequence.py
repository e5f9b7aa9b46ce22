"""One request inside the engine: its tokens, its items, its blocks and how far it has been computed."""

import enum
import time
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from llm.prompt_layout import PLAIN, PromptLayout
from preprocess.schema import PlaceholderRange


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words; `ABORT` and `ERROR` never reach a client as a normal end."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class PromptItem:
    """An item of the prompt: its content's hash, the prompt position of each of its embeddings, ascending, and these,
    (num_embeds, embedding_size), or None until they have arrived."""

    mm_hash: str
    positions: Seq[int]
    embeddings: torch.Tensor | None

    @classmethod
    def at(cls, placeholder: PlaceholderRange, mm_hash: str, embeddings: torch.Tensor | None) -> "PromptItem":
        return cls(mm_hash, placeholder.embed_positions(), embeddings)

    def between(self, start: int, end: int) -> tuple[Seq[int], torch.Tensor]:
        """The positions in [start, end) and their embeddings, which have to be there if there are any positions."""
        rows = slice(bisect_left(self.positions, start), bisect_left(self.positions, end))
        if not self.positions[rows]:
            return (), torch.empty(0, 0)
        assert self.embeddings is not None, "scheduled before its embeddings had arrived"
        return self.positions[rows], self.embeddings[rows]


@dataclass(slots=True)
class SequenceTimes:
    """Moments in seconds of `time.perf_counter`; None until reached. The first schedule is the end of queueing."""

    arrival: float = field(default_factory=time.perf_counter)
    first_scheduled: float | None = None
    first_token: float | None = None
    second_token: float | None = None

    def note_token(self) -> None:
        now = time.perf_counter()
        if self.first_token is None:
            self.first_token = now
        else:
            self.second_token = now


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed_tokens` positions have their keys and values in the blocks of `block_table`, in order.

    `index` tells the answers of a request of several from each other; all but the first have a `parent`, whose prompt
    they share. `block_hashes` names the content of the full blocks, from `prefix_root` on, see `prefix_cache`.
    `num_prompt_logprobs`: how many of the likeliest tokens are wanted at each position of the prompt, None: nothing;
    the first `num_scored_tokens` positions have been told. Those of a lower `priority` go first.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    items: list[PromptItem]
    max_num_tokens: int
    layout: PromptLayout = PLAIN
    index: int = 0
    parent: "Sequence | None" = None
    prefix_root: bytes = b""
    num_prompt_logprobs: int | None = None
    num_scored_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    priority: int = 0
    arrival_number: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    times: SequenceTimes = field(default_factory=SequenceTimes)

    @property
    def rank(self) -> tuple[int, int]:
        """Orders all sequences: the least is served first and preempted last."""
        return self.priority, self.arrival_number

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def awaits_embeddings(self) -> bool:
        """Whether it cannot answer before they come."""
        return not self.is_prompt_computed and any(item.embeddings is None for item in self.items)

    @property
    def num_ready_tokens(self) -> int:
        """Positions up to the first one, not computed yet, that waits for its embedding.

        The last of the prompt waits for all of them, also those that the prefix cache has made up for: when the blocks
        are taken away they are needed, and who hands them over may still say that there will be none.
        """
        if self.num_computed_tokens >= self.num_prompt_tokens:
            return len(self.token_ids)
        awaited = (item.positions for item in self.items if item.embeddings is None)
        starts = [at[bisect_left(at, self.num_computed_tokens)] for at in awaited if at[-1] >= self.num_computed_tokens]
        return min(starts, default=self.num_prompt_tokens - 1 if self.awaits_embeddings else self.num_tokens)

    @property
    def reuses_prefix(self) -> bool:
        """Off where all of the prompt has to be computed, whatever is cached: its logits are wanted."""
        return self.num_prompt_logprobs is None or self.num_scored_tokens >= self.num_prompt_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_prompt_computed(self) -> bool:
        return self.num_computed_tokens >= self.num_prompt_tokens

    def last_whole(self, end: int) -> int:
        """The greatest position up to `end` where a chunk may end: not within a span."""
        for span in self.layout.spans:
            if span.start < end < span.end:
                return span.start
        return end

    def end_of_span(self, position: int) -> int:
        """The end of the span that holds `position`; the next position where none does."""
        return next((span.end for span in self.layout.spans if span.start <= position < span.end), position + 1)

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.times.second_token is None:
            self.times.note_token()
