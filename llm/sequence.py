"""One request inside the engine: its tokens, its items, its blocks and how far it has been computed."""

import enum
import time
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import compress

import torch

from llm.prompt_layout import PLAIN, PromptLayout
from llm.sampler_state import SamplerState
from llm.sampling_params import SamplingParams
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
        positions: Seq[int] = range(placeholder.offset, placeholder.offset + placeholder.length)
        if placeholder.is_embed is not None:
            positions = tuple(compress(positions, placeholder.is_embed))
        return cls(mm_hash, positions, embeddings)

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


@dataclass(slots=True)
class Sequence:
    """`num_computed_tokens` positions have their keys and values in the blocks of `block_table`, in order."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    items: list[PromptItem]
    sampling_params: SamplingParams
    max_num_tokens: int
    layout: PromptLayout = PLAIN
    sampler_state: SamplerState | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    finish_reason: FinishReason | None = None
    times: SequenceTimes = field(default_factory=SequenceTimes)

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
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        now = time.perf_counter()
        if self.times.first_token is None:
            self.times.first_token = now
        elif self.times.second_token is None:
            self.times.second_token = now

    def finish(self, reason: FinishReason) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
