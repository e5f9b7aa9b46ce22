"""What the engine says: one output for each answer that a step has gone on with, and figures of its state."""

from dataclasses import dataclass

from llm.logprobs import TokenLogprobs
from llm.sequence import FinishReason, SequenceTimes


@dataclass(slots=True)
class RequestOutput:
    """What one step adds to answer `index` of a request; `finish_reason` is set on that answer's last output.

    `logprobs`: of `token_ids`, one each, where they were asked for. `prompt_logprobs`: of the prompt's tokens but the
    first, on the first output of answer 0. `num_cached_tokens`: of the prompt, those whose keys and values were in the
    prefix cache.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    num_prompt_tokens: int
    num_cached_tokens: int
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
