"""Names, units, tags and buckets of every metric; docs/metrics.md explains them.

A metric with the same meaning as one of vLLM's has the same name, so dashboards carry over. Exported names start with
`raylens_`."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

import raylens
from raylens.deployments.metrics.instruments import Counter, Gauge, Histogram
from raylens.deployments.metrics.waterfall_stages import WATERFALL
from raylens.preprocess.cache import ItemCache

if TYPE_CHECKING:
    from raylens.llm.outputs import EngineStats

MODALITIES = ("text", "image", "video", "image+video")
"""The modality of a request: all item kinds in its prompt, or text."""
ITEM_MODALITIES = ("image", "video")
STAGES = ("shared", "preprocess", "encode", "generate")
ADMISSION_REASONS = ("bytes", "pixels", "queue", "queue_of_key", "queue_seconds")
RESOURCES = ("requests", "bytes", "pixels", "tokens")
EDGES = ("preprocess_encode", "encode_generate")
STEP_PARTS = ("schedule", "model", "sample", "other")
_ENGINE_COUNTS = {
    "num_preemptions": ("num_preemptions", "sequences", "Sequences preempted and recomputed"),
    "num_prefix_queries": ("prefix_cache_queries", "tokens", "Prompt tokens looked up in the prefix cache"),
    "num_prefix_hits": ("prefix_cache_hits", "tokens", "Prompt tokens found in the prefix cache"),
    "num_steps": ("engine_steps", "steps", "Steps of the engine"),
    "num_prefill_tokens": ("engine_prefill_tokens", "tokens", "Prompt tokens computed in steps"),
    "num_decoded_sequences": ("engine_decoded_sequences", "sequences", "Sequences that decoded in steps"),
    "num_draft_tokens": ("spec_decode_num_draft_tokens", "tokens", "Tokens guessed by prompt lookup"),
    "num_accepted_tokens": ("spec_decode_num_accepted_tokens", "tokens", "Tokens guessed right by prompt lookup"),
}
"""Name, unit and description of the counter for each of the engine's own counts."""
MAX_API_KEYS = 100
"""Keys with their own series. All others share OTHER_KEYS, which is no valid key name."""
OTHER_KEYS = "(others)"

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5)
_STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class ReplicaMetrics:
    def __init__(self) -> None:
        self.starts = Counter("replica_starts", "replicas", "Replicas started")
        self.start_time = Gauge("replica_start_time_seconds", "s since 1970", "Start time of the replica")
        self.build_info = Gauge("build_info", "1", "Software versions of the replica", "version", "ray_version")

    def report_start(self) -> None:
        self.starts.inc()
        self.start_time.set(time.time())
        self.build_info.set(1, version=raylens.__version__, ray_version=ray.__version__)


class RequestTimes:
    """Durations of whole requests and of their parts."""

    def __init__(self, models: Sequence[str]) -> None:
        model: dict[str, Sequence[str]] = {"model": models}
        modality = {**model, "modality": MODALITIES[:2]}
        cached = {**modality, "cached": ("yes", "no")}
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "s", "From arrival to the first token", _LATENCY_BUCKETS, **cached
        )
        self.inter_token_latency = Histogram(
            "inter_token_latency_seconds", "s", "Each gap between two tokens", _TOKEN_LATENCY_BUCKETS, **modality
        )
        self.time_per_output_token = Histogram(
            "request_time_per_output_token_seconds",
            "s",
            "A request's mean gap between tokens",
            _TOKEN_LATENCY_BUCKETS,
            **model,
        )
        self.e2e_latency = Histogram(
            "e2e_request_latency_seconds", "s", "From arrival to the last token", _LATENCY_BUCKETS, **cached
        )
        self.queue_time = Histogram(
            "request_queue_time_seconds", "s", "Waiting time in the engine", _LATENCY_BUCKETS, **model
        )
        self.prefill_time = Histogram(
            "request_prefill_time_seconds", "s", "From the first step to the first token", _LATENCY_BUCKETS, **model
        )
        self.decode_time = Histogram(
            "request_decode_time_seconds", "s", "From the first token to the last", _LATENCY_BUCKETS, **model
        )
        stages = {"stage": WATERFALL}
        self.stage_seconds = Histogram("request_stage_seconds", "s", "The stage waterfall", _STAGE_BUCKETS, **stages)


class ApiKeyUse:
    def __init__(self, api_keys: Sequence[str]) -> None:
        names = api_keys[:MAX_API_KEYS]
        self._named = set(names)
        self.requests = Counter("api_key_requests", "requests", "Requests by API key", api_key=names)
        self.prompt_tokens = Counter("api_key_prompt_tokens", "tokens", "Prompt tokens by API key", api_key=names)
        self.generation_tokens = Counter(
            "api_key_generation_tokens", "tokens", "Generated tokens by API key", api_key=names
        )

    def label(self, api_key: str) -> str:
        """Returns the label of an API key: its name, or OTHER_KEYS once MAX_API_KEYS keys have series."""
        if len(self._named) < MAX_API_KEYS:
            self._named.add(api_key)
        return api_key if api_key in self._named else OTHER_KEYS


class EndpointState:
    """The endpoint's queues, admission budgets, and view of the stages."""

    def __init__(self) -> None:
        self.open_http_requests = Gauge("open_http_requests", "requests", "Unanswered requests and open streams")
        self.admission_waiting = Gauge("admission_waiting_requests", "requests", "Requests that wait for room")
        unit = "of the resource"
        self.admission_used = Gauge("admission_used", unit, "Budget in use by this replica's requests", "resource")
        self.admission_limit = Gauge("admission_limit", unit, "Budget of all replicas together", "resource")
        self.stage_ready = Gauge("stage_ready", "1 or 0", "1 if the stage is ready", "model", "stage")
        self.stage_heartbeat_age = Gauge(
            "stage_heartbeat_age_seconds", "s", "Time since the stage's last heartbeat", "model", "stage"
        )

    def report_load(self, num_open: float, num_waiting: int) -> None:
        self.open_http_requests.set(num_open)
        self.admission_waiting.set(num_waiting)

    def report_budget(self, used: object, limit: object) -> None:
        """`used`, `limit`: objects with an attribute for each resource."""
        for resource in RESOURCES:
            self.admission_used.set(getattr(used, resource), resource=resource)
            self.admission_limit.set(getattr(limit, resource), resource=resource)

    def report_stage(self, model: str, stage: str, *, is_ready: bool, age_s: float | None) -> None:
        """`age_s`: seconds since the stage's last sign of life, None without one."""
        self.stage_ready.set(is_ready, model=model, stage=stage)
        if age_s is not None:
            self.stage_heartbeat_age.set(age_s, model=model, stage=stage)


class IngressMetrics:
    """The metrics of the ingress: counts and durations of whole requests, and the endpoint's state."""

    def __init__(
        self, models: Sequence[str] = (), errors: Sequence[tuple[str, str]] = (), api_keys: Sequence[str] = ()
    ) -> None:
        """`models`: names of the served models. `errors`: (stage, code) of possible errors. `api_keys`: names of the
        existing keys."""
        self.times = RequestTimes(models)
        self.api_keys = ApiKeyUse(api_keys)
        self.state = EndpointState()
        self.prompt_tokens = Counter(
            "prompt_tokens", "tokens", "Prompt tokens, counted with the first token", model=models
        )
        self.prompt_tokens_cached = Counter(
            "prompt_tokens_cached", "tokens", "Prompt tokens found in the prefix cache", model=models
        )
        self.generation_tokens = Counter(
            "generation_tokens", "tokens", "Generated tokens, counted when sent", model=models
        )
        reasons = ("stop", "length", "abort")
        self.request_success = Counter(
            "request_success",
            "requests",
            "Ended requests; abort: the client left",
            model=models,
            finished_reason=reasons,
        )
        self.requests_within_slo = Counter(
            "requests_within_slo", "requests", "Ended requests within the SLO of the settings", model=models
        )
        self.request_errors = Counter("request_errors", "requests", "Failed requests", stage=(), code=())
        for stage, code in errors:
            self.request_errors.of(stage=stage, code=code)
        self.admission_rejections = Counter(
            "admission_rejections", "requests", "Refused requests, by the exhausted resource", reason=ADMISSION_REASONS
        )
        self.items_recomputed = _items_recomputed()
        self.request_prompt_tokens = Histogram(
            "request_prompt_tokens", "tokens", "Prompt tokens of a request", _TOKEN_BUCKETS, model=models
        )
        self.request_generation_tokens = Histogram(
            "request_generation_tokens", "tokens", "Generated tokens of a request", _TOKEN_BUCKETS, model=models
        )
        self.mm_items = Counter(
            "mm_items", "items", "Media items, counted with the first token", modality=ITEM_MODALITIES
        )
        self.mm_media_download_bytes = Counter("mm_media_download_bytes", "bytes", "Media fetched from URLs")

    def count_error(self, stage: str, code: str) -> None:
        self.request_errors.inc(stage=stage, code=code)

    def count_rejection(self, reason: str) -> None:
        self.admission_rejections.inc(reason=reason)


class ItemMetrics:
    """The metrics of a shard: both caches, their contents, and uploaded files."""

    def __init__(self) -> None:
        self.items_recomputed = _items_recomputed()
        self.object_store_transfer_bytes = Counter(
            "object_store_transfer_bytes", "bytes", "Tensors passed between stages by reference", edge=EDGES
        )
        self.mm_cache = CacheMetrics("mm_cache")
        self.encoder_cache = CacheMetrics("encoder_cache")
        self.items_in_progress = Gauge("items_in_progress", "items", "Items in Preprocess or Encode")
        self.uploads_files = Gauge("uploads_files", "files", "Uploaded files kept")
        self.uploads_bytes = Gauge("uploads_bytes", "bytes", "Size of the uploaded files")


def _items_recomputed() -> Counter:
    return Counter(
        "items_recomputed",
        "calls",
        "Calls repeated after a lost replica or lost data",
        stage=STAGES,
        reason=("ActorDiedError",),
    )


class CacheMetrics:
    """The metrics of one cache: its queries, hits and evictions in items, and its size in bytes."""

    def __init__(self, name: str) -> None:
        modality = ITEM_MODALITIES
        self.queries = Counter(f"{name}_queries", "items", "Items looked up", modality=modality)
        self.hits = Counter(f"{name}_hits", "items", "Items found", modality=modality)
        self.evictions = Counter(f"{name}_evictions", "items", "Items evicted to make room", modality=modality)
        self.num_bytes = Gauge(f"{name}_bytes", "bytes", "Size of the cached items")
        self.capacity_bytes = Gauge(f"{name}_capacity_bytes", "bytes", "Limit of this size")

    def count_query(self, modality: str, *, is_hit: bool) -> None:
        self.queries.inc(modality=modality)
        if is_hit:
            self.hits.inc(modality=modality)

    def count_eviction(self, modality: str) -> None:
        self.evictions.inc(modality=modality)

    def report(self, cache: ItemCache[Any, Any]) -> None:
        self.num_bytes.set(cache.stats.num_bytes)
        self.capacity_bytes.set(cache.capacity_bytes)


class PreprocessMetrics:
    def __init__(self) -> None:
        self.pending_pixels = Gauge("preprocess_pending_pixels", "pixels", "Pixels in work or waiting")
        self.waiting_items = Gauge("preprocess_waiting_items", "items", "Items that wait for the processor")
        self.items_total = Counter(
            "preprocess_items_total", "items", "Items processed", modality=ITEM_MODALITIES, status=("ok", "error")
        )


class RemoteBytes:
    """The bytes that a stage received from other nodes."""

    def __init__(self, edge: str) -> None:
        self._edge = edge
        self._counter = Counter("node_transfer_bytes", "bytes", "Tensors received from another node", edge=(edge,))

    def inc(self, num_bytes: int) -> None:
        self._counter.inc(num_bytes, edge=self._edge)


class EncodeMetrics:
    def __init__(self) -> None:
        self.batch_size = Histogram("encoder_batch_size", "items", "Size of each item's batch", _BATCH_BUCKETS)
        status = ("ok", "error", "aborted")
        self.items_total = Counter(
            "encoder_items_total", "items", "Items encoded", modality=ITEM_MODALITIES, status=status
        )
        self.waiting_items = Gauge("encoder_waiting_items", "items", "Items that wait for a batch")
        self.waiting_patches = Gauge("encoder_waiting_patches", "patches", "Patches that wait for a batch")
        self.remote_bytes = RemoteBytes("preprocess_encode")


class GenerateMetrics:
    def __init__(self) -> None:
        self.num_running = Gauge("num_requests_running", "sequences", "Sequences in the running batch")
        self.num_waiting = Gauge("num_requests_waiting", "sequences", "Sequences that wait for a place in the batch")
        self.num_lacking_tokens = Gauge("waiting_prompt_tokens", "tokens", "Prompt tokens to compute")
        self.kv_cache_usage = Gauge("kv_cache_usage_perc", "0 to 1", "Share of the KV cache in use")
        self.counts = {name: Counter(*definition) for name, definition in _ENGINE_COUNTS.items()}
        self.step_seconds = Counter("engine_step_seconds", "s", "Time of the parts of steps", part=STEP_PARTS)
        self.remote_bytes = RemoteBytes("encode_generate")
        self._reported: EngineStats | None = None

    def report(self, stats: "EngineStats") -> None:
        """Sets the gauges and advances the counters to the engine's own counts."""
        self.num_running.set(stats.num_running)
        self.num_waiting.set(stats.num_waiting)
        self.num_lacking_tokens.set(stats.num_lacking_tokens)
        self.kv_cache_usage.set(stats.kv_cache_usage)
        before, self._reported = self._reported, stats
        for name, counter in self.counts.items():
            counter.inc(getattr(stats, name) - (0 if before is None else getattr(before, name)))
        for part, seconds in stats.step_seconds.items():
            self.step_seconds.inc(seconds - (0 if before is None else before.step_seconds[part]), part=part)
