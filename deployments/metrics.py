"""Names, tags and buckets of every metric; see docs/metrics.md. Only processes of a Ray Serve replica record metrics.

A metric that means what one of vLLM's metrics means has the same name, so that dashboards carry over. Ray's agent on
each node exports the metrics as `ray_raylens_<name>`, the ingress's `/metrics` as `raylens_<name>`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from ray.serve.metrics import Counter, Gauge, Histogram

from preprocess.cache import CacheStats

if TYPE_CHECKING:
    from llm.outputs import EngineStats

PREFIX = "raylens_"

_LATENCY_BUCKETS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0]
_TOKEN_LATENCY_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5]
_STAGE_BUCKETS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
_TOKEN_BUCKETS = [
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
    500.0,
    1000.0,
    2000.0,
    5000.0,
    10000.0,
    50000.0,
]
_BATCH_BUCKETS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]


def _counter(name: str, description: str, *tags: str) -> Counter:
    return Counter(PREFIX + name, description, tag_keys=tags)


def _gauge(name: str, description: str, *tags: str) -> Gauge:
    return Gauge(PREFIX + name, description, tag_keys=tags)


def _histogram(name: str, description: str, buckets: list[float], *tags: str) -> Histogram:
    return Histogram(PREFIX + name, description, boundaries=buckets, tag_keys=tags)


class IngressMetrics:
    """The metrics of the ingress: whole requests and the stage waterfall."""

    def __init__(self) -> None:
        self.prompt_tokens = _counter("prompt_tokens", "Prompt tokens of requests that reached their first token")
        self.prompt_tokens_cached = _counter("prompt_tokens_cached", "Of these, those found in the prefix cache")
        self.generation_tokens = _counter("generation_tokens", "Tokens generated, counted as they are sent")
        self.request_success = _counter("request_success", "Requests ended; abort: the client left", "finished_reason")
        self.request_errors = _counter("request_errors", "Requests ended by an error", "stage", "code")
        self.admission_rejections = _counter(
            "admission_rejections", "Requests refused for want of room, by what there was none of", "reason"
        )
        self.items_recomputed = _items_recomputed()
        self.time_to_first_token = _histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _LATENCY_BUCKETS
        )
        self.inter_token_latency = _histogram(
            "inter_token_latency_seconds", "Each gap between two tokens", _TOKEN_LATENCY_BUCKETS
        )
        self.time_per_output_token = _histogram(
            "request_time_per_output_token_seconds",
            "A request's mean gap between tokens",
            _TOKEN_LATENCY_BUCKETS,
        )
        self.e2e_latency = _histogram("e2e_request_latency_seconds", "From arrival to the last token", _LATENCY_BUCKETS)
        self.queue_time = _histogram("request_queue_time_seconds", "Waiting in the engine", _LATENCY_BUCKETS)
        self.prefill_time = _histogram(
            "request_prefill_time_seconds", "From the first schedule to the first token", _LATENCY_BUCKETS
        )
        self.decode_time = _histogram(
            "request_decode_time_seconds", "From the first token to the last", _LATENCY_BUCKETS
        )
        self.request_prompt_tokens = _histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKEN_BUCKETS)
        self.request_generation_tokens = _histogram(
            "request_generation_tokens", "Tokens generated for a request", _TOKEN_BUCKETS
        )
        self.stage_seconds = _histogram("request_stage_seconds", "The stage waterfall", _STAGE_BUCKETS, "stage")
        self.mm_items = _counter("mm_items", "Media items of accepted requests", "modality")
        self.mm_media_download_bytes = _counter("mm_media_download_bytes", "Bytes of media fetched from URLs")

    def count_error(self, stage: str, code: str) -> None:
        self.request_errors.inc(tags={"stage": stage, "code": code})

    def count_rejection(self, reason: str) -> None:
        self.admission_rejections.inc(tags={"reason": reason})


class ItemMetrics:
    """The metrics of the items that all replicas of the ingress share: both caches, and what they are filled with."""

    def __init__(self) -> None:
        self.items_recomputed = _items_recomputed()
        self.object_store_transfer_bytes = _counter(
            "object_store_transfer_bytes", "Bytes handed from stage to stage by reference", "edge"
        )
        self.mm_cache = CacheMetrics("mm_cache")
        self.encoder_cache = CacheMetrics("encoder_cache")


def _items_recomputed() -> Counter:
    return _counter("items_recomputed", "Work done again elsewhere", "stage", "reason")


class CacheMetrics:
    """The metrics of one cache: its queries, hits and evictions in items, and its size in bytes."""

    def __init__(self, name: str) -> None:
        self.queries = _counter(f"{name}_queries", "Items asked for")
        self.hits = _counter(f"{name}_hits", "Items found")
        self.evictions = _counter(f"{name}_evictions", "Items dropped to make room")
        self.num_bytes = _gauge(f"{name}_bytes", "Bytes of the items held")
        self._reported = CacheStats()

    def report(self, stats: CacheStats) -> None:
        """Brings the counters up to the cache's own counts."""
        for counter, name in ((self.queries, "queries"), (self.hits, "hits"), (self.evictions, "evictions")):
            if added := getattr(stats, name) - getattr(self._reported, name):
                counter.inc(added)
        self.num_bytes.set(stats.num_bytes)
        self._reported = replace(stats)


class PreprocessMetrics:
    """The metrics of the preprocess stage."""

    def __init__(self) -> None:
        self.pending_pixels = _gauge("preprocess_pending_pixels", "Pixels of items not answered yet")


class EncodeMetrics:
    """The metrics of the encode stage."""

    def __init__(self) -> None:
        self.batch_size = _histogram("encoder_batch_size", "Batch size as each item saw it", _BATCH_BUCKETS)
        self.items_total = _counter("encoder_items_total", "Items encoded", "modality", "status")


class GenerateMetrics:
    """The metrics of the generate stage."""

    def __init__(self) -> None:
        self.num_running = _gauge("num_requests_running", "Sequences in the running batch")
        self.num_waiting = _gauge("num_requests_waiting", "Sequences waiting for a place in it")
        self.kv_cache_usage = _gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1")
        self.num_preemptions = _counter("num_preemptions", "Sequences preempted and computed again")
        self.num_steps = _counter("engine_steps", "Steps of the engine")
        self.step_seconds = _counter("engine_step_seconds", "Time that these steps took")
        self.num_draft_tokens = _counter("spec_decode_num_draft_tokens", "Tokens guessed by prompt lookup")
        self.num_accepted_tokens = _counter("spec_decode_num_accepted_tokens", "Of these, those that were right")
        self._reported: EngineStats | None = None

    def report(self, stats: "EngineStats") -> None:
        """Sets the gauges, and brings the counters up to the engine's own counts."""
        self.num_running.set(stats.num_running)
        self.num_waiting.set(stats.num_waiting)
        self.kv_cache_usage.set(stats.kv_cache_usage)
        for name in ("num_preemptions", "num_steps", "step_seconds", "num_draft_tokens", "num_accepted_tokens"):
            before = 0 if self._reported is None else getattr(self._reported, name)
            if added := getattr(stats, name) - before:
                getattr(self, name).inc(added)
        self._reported = stats
