"""A sequence, which is one answer to a request: its tokens, items and blocks, and how far it has been computed."""

import enum
import time
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raylens.llm.lora.request import LoraRequest
from raylens.llm.prompt_layout import PLAIN, PromptLayout
from raylens.llm.prompt_lookup import PromptLookup
from raylens.preprocess.schema import PlaceholderRange

if TYPE_CHECKING:
    # Not at run time: the scheduler needs no torch, and `raylens plan` runs it without.
    import torch


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
    """An item of the prompt.

    `mm_hash` is the hash of its content, and `positions` are the prompt positions of its embeddings, ascending. The
    `embeddings` are (num_embeds, embedding_size), or None until they have arrived."""

    mm_hash: str
    positions: Seq[int]
    embeddings: "torch.Tensor | None"

    @classmethod
    def at(cls, placeholder: PlaceholderRange, mm_hash: str, embeddings: "torch.Tensor | None") -> "PromptItem":
        return cls(mm_hash, placeholder.embed_positions(), embeddings)

    def rows_between(self, start: int, end: int) -> slice:
        """Returns the rows of the embeddings whose positions are in [start, end)."""
        return slice(bisect_left(self.positions, start), bisect_left(self.positions, end))


@dataclass(slots=True)
class SequenceTimes:
    """Moments of one sequence in seconds of `time.perf_counter`, None until they are reached. Queueing ends at
    `first_scheduled`."""

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
    """One answer to a request, from its prompt's first token to its latest token.

    `token_ids`: the tokens that the host knows. `num_pending_tokens`: how many further ones have been launched: the
    device chooses them, and the host has not read them yet. They have positions, and no ids. There is one at most, and
    only while the next step is scheduled and launched. `pending_row`: its row among the tokens of its step.
    The keys and values of the first `num_computed_tokens` positions are in the blocks of `block_table`, in order, as
    soon as the device has done what it was given.
    `index`: the number of the answer in its request. All answers but the first have the first as their `parent` and
    share its prompt.
    `block_hashes`: names of the content of the full blocks, which start from `prefix_root`, see `prefix_cache`.
    `num_prompt_logprobs`: how many of the likeliest tokens to name at each position of the prompt. None: the prompt is
    not scored. The first `num_scored_tokens` positions have been scored already.
    `priority`: sequences of a lower priority go first. `turn`: how many sequences of the same `tenant` go before it,
    where several tenants have sequences.
    `num_found_blocks`: how many blocks of its beginning the cache had when it was last asked, while it waits.
    `num_overtaking_tokens`: the tokens of later sequences that have started while it was the first to wait for room.
    `lookup`: guesses its next tokens. None: its tokens are computed one by one.
    `lora`: its adapter, and `lora_slot` the adapter's place in memory. While it waits it is None where the adapter is
    not in memory or may not be used yet.
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
    lookup: PromptLookup | None = None
    lora: LoraRequest | None = None
    lora_slot: int | None = None
    tenant: str = ""
    turn: int = 0
    arrival_number: int = 0
    num_found_blocks: int = 0
    num_overtaking_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    pending_row: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    times: SequenceTimes = field(default_factory=SequenceTimes)

    @property
    def num_tokens(self) -> int:
        """Returns how many positions the sequence has: those of known and of pending tokens."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Returns how many tokens of the answer are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_nameable_tokens(self) -> int:
        """Returns how many positions of the cache hold known tokens, so that full blocks of them can have names."""
        return min(self.num_computed_tokens, len(self.token_ids))

    @property
    def awaits_last_token(self) -> bool:
        """Returns whether the last token that the sequence may have is pending: it ends when the host reads it."""
        return self.num_pending_tokens > 0 and self.num_tokens >= self.max_num_tokens

    @property
    def awaits_embeddings(self) -> bool:
        """Returns whether the prompt is not computed yet and some of its embeddings have not arrived."""
        return not self.is_prompt_computed and any(item.embeddings is None for item in self.items)

    @property
    def num_ready_tokens(self) -> int:
        """Returns how many positions may be computed: those before the first uncomputed one whose embedding is missing.

        The prompt's last position waits for all embeddings, also for those whose positions came from the prefix cache.
        A preempted sequence needs them again, and the caller may still find that it cannot deliver them.
        """
        if self.num_computed_tokens >= self.num_prompt_tokens:
            return self.num_tokens
        awaited = (item.positions for item in self.items if item.embeddings is None)
        starts = [at[bisect_left(at, self.num_computed_tokens)] for at in awaited if at[-1] >= self.num_computed_tokens]
        return min(starts, default=self.num_prompt_tokens - 1 if self.awaits_embeddings else self.num_tokens)

    @property
    def reuses_prefix(self) -> bool:
        """Returns whether cached blocks may stand in for computing the prompt. They may not while its logits are needed
        for `num_prompt_logprobs`."""
        return self.num_prompt_logprobs is None or self.num_scored_tokens >= self.num_prompt_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_prompt_computed(self) -> bool:
        return self.num_computed_tokens >= self.num_prompt_tokens

    def last_whole(self, end: int) -> int:
        """Returns the greatest position up to `end` where a chunk may end, which is not within a span."""
        for span in self.layout.spans:
            if span.start < end < span.end:
                return span.start
        return end

    def end_of_span(self, position: int) -> int:
        """Returns the end of the span that holds `position`, or the next position where no span holds it."""
        return next((span.end for span in self.layout.spans if span.start <= position < span.end), position + 1)

    def add_pending_token(self, row: int) -> None:
        """Notes that a token has been launched, in this row of what its step samples."""
        self.num_pending_tokens += 1
        self.pending_row = row

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.times.second_token is None:
            self.times.note_token()
