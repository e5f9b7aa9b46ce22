"""What one request cost: its usage, its stage times, and the metrics that it leaves."""

import time
import uuid

from deployments.media_items import PipelineRequest
from deployments.metrics import IngressMetrics
from deployments.protocol import PromptTokensDetails, StageTimings, Usage
from deployments.stage_calls import StageError
from deployments.stage_messages import GeneratedText
from preprocess.schema import InvalidRequestError


class RequestAccount:
    """Watches one request: the pieces of its answer as they pass, and how it ends."""

    def __init__(self, metrics: IngressMetrics) -> None:
        self.request_id = f"chatcmpl-{uuid.uuid4().hex}"
        self.finish_reason: str | None = None
        self._metrics = metrics
        self._arrival = time.perf_counter()
        self._first_token: float | None = None
        self._last_token = self._arrival
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._has_ended = False

    def add(self, piece: GeneratedText) -> None:
        """Counts a piece that is about to be sent."""
        now = time.perf_counter()
        if self._first_token is None:
            self._first_token = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
            self._metrics.prompt_tokens.inc(piece.num_prompt_tokens)
            if piece.num_cached_tokens:
                self._metrics.prompt_tokens_cached.inc(piece.num_cached_tokens)
        elif piece.token_ids:
            # Tokens that were ready together share the gap in front of them.
            for _ in piece.token_ids:
                self._metrics.inter_token_latency.observe((now - self._last_token) / len(piece.token_ids))
        if piece.token_ids:
            self._metrics.generation_tokens.inc(len(piece.token_ids))
        self._last_token = now
        self._num_prompt_tokens = piece.num_prompt_tokens
        self._num_cached_tokens = piece.num_cached_tokens
        self._num_output_tokens = piece.num_output_tokens
        self.finish_reason = piece.finish_reason

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            total_tokens=self._num_prompt_tokens + self._num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
        )

    def timings(self, request: PipelineRequest) -> StageTimings:
        return StageTimings(
            seconds=request.stage_seconds,
            time_to_first_token=(self._first_token or self._last_token) - self._arrival,
            total=self._last_token - self._arrival,
            processor_cache_hits=request.num_processor_cache_hits,
            embedding_cache_hits=request.num_embedding_cache_hits,
        )

    def fail(self, error: BaseException) -> None:
        """Records a request that ended early: refused, failed, or left by its client."""
        if self._has_ended:
            return
        self._has_ended = True
        if not isinstance(error, Exception):
            self._metrics.request_success.inc(tags={"finished_reason": "abort"})
            return
        stage = error.stage if isinstance(error, StageError) else "ingress"
        code = error.code if isinstance(error, InvalidRequestError) else type(error).__name__
        self._metrics.request_errors.inc(tags={"stage": stage, "code": code})

    def finish(self, request: PipelineRequest) -> None:
        """Records a request that was answered to its end."""
        if self._has_ended:
            return
        self._has_ended = True
        metrics, seconds = self._metrics, request.stage_seconds
        first_token = self._first_token or self._last_token
        metrics.request_success.inc(tags={"finished_reason": self.finish_reason or "stop"})
        metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        metrics.request_generation_tokens.observe(self._num_output_tokens)
        metrics.e2e_latency.observe(self._last_token - self._arrival)
        metrics.decode_time.observe(self._last_token - first_token)
        metrics.queue_time.observe(seconds.get("llm_queue", 0.0))
        metrics.prefill_time.observe(seconds.get("prefill", 0.0))
        if self._num_output_tokens > 1:
            metrics.time_per_output_token.observe((self._last_token - first_token) / (self._num_output_tokens - 1))
        for stage, stage_seconds in seconds.items():
            metrics.stage_seconds.observe(stage_seconds, tags={"stage": stage})
