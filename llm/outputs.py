"""The engine's results: an output for each answer that a step has advanced or ended, and statistics."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from raylens.llm.lora.request import LoraError
from raylens.llm.sampling.logprobs import TokenLogprobs
from raylens.llm.sampling.sampler import SampledToken
from raylens.llm.sequence import FinishReason, Sequence, SequenceTimes
from raylens.llm.step_clock import StepPart
from raylens.preprocess.schema import InvalidRequestError


@dataclass(slots=True)
class RequestOutput:
    """One step's addition to answer `index` of a request. `finish_reason` is set on that answer's last output.

    `has_stop_token`: the last of `token_ids` ended the answer and is not part of its text. `logprobs`: one for each of
    `token_ids`, if the request asks for them. `prompt_logprobs`: one for each token of the prompt but the first, on the
    first output of answer 0. `num_cached_tokens`: the number of prompt tokens found in the prefix cache. `pooled`: the
    vectors or scores of the prompt, float32 (num_rows, size), see `Pooler.result`; None unless they were asked for."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: Seq[TokenLogprobs]
    prompt_logprobs: Seq[TokenLogprobs]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None
    has_stop_token: bool
    times: SequenceTimes
    error: InvalidRequestError | LoraError | None = None
    pooled: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        token: SampledToken | None = None,
        *,
        has_stop_token: bool = False,
        prompt_logprobs: Seq[TokenLogprobs] = (),
        error: InvalidRequestError | LoraError | None = None,
        pooled: torch.Tensor | None = None,
    ) -> "RequestOutput":
        """Returns the output of `sequence`, to which `token` has been appended."""
        return cls(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=[] if token is None else [token.token_id],
            logprobs=() if token is None or token.logprobs is None else (token.logprobs,),
            prompt_logprobs=prompt_logprobs,
            num_prompt_tokens=sequence.num_request_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_output_tokens=sequence.num_output_tokens,
            finish_reason=sequence.finish_reason,
            has_stop_token=has_stop_token,
            times=sequence.times,
            error=error,
            pooled=pooled,
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine. `num_lacking_tokens`: prompt tokens still to compute. `kv_cache_usage`: 0 to 1. All
    fields from `num_preemptions` on are totals since the start."""

    num_running: int
    num_waiting: int
    num_lacking_tokens: int
    kv_cache_usage: float
    num_preemptions: int
    num_steps: int
    step_seconds: Mapping[StepPart, float]
    num_prefill_tokens: int
    num_decoded_sequences: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_draft_tokens: int
    num_accepted_tokens: int
