"""The usage, stage times and metrics of one request."""

import time
from collections.abc import Sequence
from functools import cached_property
from itertools import chain

from prometheus_client import Counter

from raylens.deployments.api.wire import CompletionTokensDetails, PromptTokensDetails, StageTimings, Usage
from raylens.deployments.config import MetricsConfig
from raylens.deployments.endpoint.api_keys import Caller
from raylens.deployments.metrics.definitions import IngressMetrics
from raylens.deployments.pipeline.pipeline_request import PipelineRequest, seconds_by_stage
from raylens.deployments.stages.stage_calls import StageFailedError
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.preprocess.schema import StageTime

_MOST_GAPS = 32
"""Gaps between tokens are observed in batches of this size. A killed ingress loses its current batch."""


class RequestAccount:
    """Tracks one client request: the pieces of its answers as they are sent, and its end.

    `model`: the name of the answering model or adapter. `requests`: the pipeline's requests, one for each prompt, with
    `num_answers` answers each. Answer i belongs to prompt i // num_answers. Nobody waits for a batch's request: none of
    its times are observed, and it is within the SLO."""

    def __init__(self, metrics: IngressMetrics, request_id: str, caller: Caller, goals: MetricsConfig) -> None:
        self.request_id = request_id
        self.created = int(time.time())
        self.model = ""
        self.requests: Sequence[PipelineRequest] = ()
        self.num_answers = 1
        self.times: list[StageTime] = []
        """Stage times of the request as a whole, without its prompts' times."""
        self._metrics = metrics
        self._api_key = None if caller.name is None else metrics.api_keys.label(caller.name)
        self._is_batch = caller.is_batch
        self._goals = goals
        self._arrival = time.perf_counter()
        self._first_token: float | None = None
        self._last_token = self._arrival
        # The last piece of each answer, by index, and when it came.
        self._last_pieces: dict[int, tuple[GeneratedText, float]] = {}
        self._num_counted: dict[int, int] = {}
        """Tokens in the metrics, by answer. A retried answer does not count twice."""
        self._gaps: list[float] = []
        self._has_ended = False
        if self._api_key is not None:
            metrics.api_keys.requests.inc(api_key=self._api_key)

    def add(self, piece: GeneratedText) -> None:
        """Counts a piece that is about to be sent. Raises StageFailedError if the piece reports an engine failure."""
        now = time.perf_counter()
        if self._first_token is None and not piece.pooled:
            self._first_token = now
            if not self._is_batch:
                self._metrics.times.time_to_first_token.observe(now - self._arrival, **self._kind())
        self._count(piece)
        if (last := self._last_pieces.get(piece.index)) is not None and piece.token_ids:
            # Tokens that were ready together share the gap in front of them.
            num_tokens = len(piece.token_ids)
            self._gaps += [(now - last[1]) / num_tokens] * num_tokens
            if len(self._gaps) >= _MOST_GAPS:
                self.observe_gaps()
        self._last_token = now
        self._last_pieces[piece.index] = piece, now
        if piece.finish_reason not in (None, "stop", "length"):
            raise StageFailedError("generate", f"the engine ended the request with {piece.finish_reason!r}")

    def _count(self, piece: GeneratedText) -> None:
        metrics, key, index = self._metrics, self._api_key, piece.index
        if index not in self._num_counted and index % self.num_answers == 0:
            metrics.prompt_tokens.inc(piece.num_prompt_tokens, model=self.model)
            metrics.prompt_tokens_cached.inc(piece.num_cached_tokens, model=self.model)
            for source in self.requests[index // self.num_answers].media:
                metrics.mm_items.inc(modality=source.modality)
            if key is not None:
                metrics.api_keys.prompt_tokens.inc(piece.num_prompt_tokens, api_key=key)
        num_new = piece.num_output_tokens - self._num_counted.setdefault(index, 0)
        if num_new > 0:
            self._num_counted[index] += num_new
            self._generated.inc(num_new)
            if key is not None:
                metrics.api_keys.generation_tokens.inc(num_new, api_key=key)

    @cached_property
    def _generated(self) -> Counter:
        return self._metrics.generation_tokens.of(model=self.model)

    @cached_property
    def _modality(self) -> str:
        kinds = {source.modality for request in self.requests for source in request.media}
        return "+".join(sorted(kinds)) or "text"

    def _kind(self) -> dict[str, str]:
        """Returns the labels of metrics that depend on the request's media. Call it after the cache lookups."""
        num_items = sum(len(request.media) for request in self.requests)
        num_cached = sum(request.trace.num_embedding_cache_hits for request in self.requests)
        cached = "yes" if 0 < num_items == num_cached else "no"
        return {"model": self.model, "modality": self._modality, "cached": cached}

    def observe_gaps(self) -> None:
        """Observes the batched gaps between tokens. Call it when the answers end or fail."""
        gaps, self._gaps = self._gaps, []
        if gaps and not self._is_batch:
            series = self._metrics.times.inter_token_latency.of(model=self.model, modality=self._modality)
            series.observe_all(gaps)

    def begin_again(self) -> None:
        """Forgets the pieces so far, before a retry."""
        self._last_pieces.clear()
        for request in self.requests:
            request.trace.clear()

    def finish_reason(self, index: int) -> str | None:
        return self._last_pieces[index][0].finish_reason

    @property
    def usage(self) -> Usage:
        """Returns the usage of all prompts and answers together. A prompt counts once, however many answers it has."""
        firsts = [piece for index, (piece, _) in self._last_pieces.items() if index % self.num_answers == 0]
        pieces = [piece for piece, _ in self._last_pieces.values()]
        num_thought_tokens = sum(piece.num_thought_tokens for piece in pieces)
        return usage_of(firsts, sum(piece.num_output_tokens for piece in pieces), num_thought_tokens)

    @property
    def time_to_first_token(self) -> float:
        """In seconds, from the request's arrival."""
        return (self._first_token or self._last_token) - self._arrival

    def timings(self) -> StageTimings:
        return StageTimings(
            seconds=self._stage_seconds(),
            time_to_first_token=self.time_to_first_token,
            total=self._last_token - self._arrival,
            processor_cache_hits=sum(request.trace.num_processor_cache_hits for request in self.requests),
            embedding_cache_hits=sum(request.trace.num_embedding_cache_hits for request in self.requests),
        )

    def abort(self) -> None:
        """Records that the client left. `deployments/endpoint/access_log.py` records failures."""
        if not self._has_ended:
            self._has_ended = True
            self._metrics.request_success.inc(model=self.model, finished_reason="abort")

    def finish(self) -> None:
        """Records a request whose answers were all sent."""
        if self._has_ended:
            return
        self._has_ended = True
        metrics, usage, model = self._metrics, self.usage, self.model
        metrics.request_success.inc(model=model, finished_reason=self.finish_reason(0) or "stop")
        metrics.request_prompt_tokens.observe(usage.prompt_tokens, model=model)
        metrics.request_generation_tokens.observe(usage.completion_tokens, model=model)
        if self._is_batch:
            metrics.requests_within_slo.inc(model=model)
        else:
            self._observe_times(usage.completion_tokens)

    def _observe_times(self, num_output_tokens: int) -> None:
        metrics, seconds, model = self._metrics, self._stage_seconds(), self.model
        decode_seconds = self._last_token - (self._first_token or self._last_token)
        metrics.times.e2e_latency.observe(self._last_token - self._arrival, **self._kind())
        metrics.times.decode_time.observe(decode_seconds, model=model)
        metrics.times.queue_time.observe(seconds.get("llm_queue", 0.0), model=model)
        metrics.times.prefill_time.observe(seconds.get("prefill", 0.0), model=model)
        num_gaps = num_output_tokens / len(self._last_pieces) - 1  # per answer, on average
        per_token = decode_seconds / num_gaps if num_gaps > 0 else 0.0
        if num_gaps > 0:
            metrics.times.time_per_output_token.observe(per_token, model=model)
        is_fast = per_token <= self._goals.slo_time_per_output_token_s
        if is_fast and self.time_to_first_token <= self._goals.slo_time_to_first_token_s:
            metrics.requests_within_slo.inc(model=model)
        for stage, stage_seconds in seconds.items():
            metrics.times.stage_seconds.observe(stage_seconds, stage=stage)

    @property
    def has_begun(self) -> bool:
        return bool(self._last_pieces)

    @property
    def finish_reasons(self) -> list[str]:
        return [reason for index in sorted(self._last_pieces) if (reason := self.finish_reason(index)) is not None]

    def _stage_seconds(self) -> dict[str, float]:
        """Returns the seconds of each stage. Prompts run in parallel, so the slowest prompt counts."""
        return seconds_by_stage(chain(self.times, *(request.trace.times for request in self.requests)))


def usage_of(prompts: Sequence[GeneratedText], num_output_tokens: int, num_thought_tokens: int) -> Usage:
    """`prompts`: a piece of an answer to each prompt."""
    num_prompt_tokens = sum(piece.num_prompt_tokens for piece in prompts)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(piece.num_cached_tokens for piece in prompts)),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_thought_tokens)
        if num_thought_tokens
        else None,
    )
