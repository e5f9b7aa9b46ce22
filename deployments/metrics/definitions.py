"""Names, units, tags and buckets of every metric; docs/metrics.md explains them.

A metric with the same meaning as one of vLLM's has the same name, so dashboards carry over. Exported names start with
`raylens_`."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

import raylens
from raylens.deployments.metrics.instruments import Counter, Gauge, Histogram
from raylens.deployments.metrics.waterfall_stages import WATERFALL
from raylens.preprocess.cache import ItemCache

if TYPE_CHECKING:
    from raylens.llm.outputs import EngineStats

FIRST_MODALITIES = ("text", "image")
"""The modalities of a request whose series start at 0. A request's modality is text, or all item kinds in its prompt,
such as audio+image."""
ITEM_MODALITIES = ("image", "video", "audio")
STAGES = ("shared", "preprocess", "encode", "generate")
ADMISSION_REASONS = ("bytes", "pixels", "queue", "queue_of_key", "queue_seconds")
RESOURCES = ("requests", "bytes", "pixels", "tokens")
EDGES = ("preprocess_encode", "encode_generate")
STEP_PARTS = ("schedule", "model", "sample", "other")
_ENGINE_COUNTS = {
    "num_preemptions": ("sequences", "num_preemptions", "Sequences preempted and recomputed"),
    "num_prefix_queries": ("tokens", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "num_prefix_hits": ("tokens", "prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "num_steps": ("steps", "engine_steps", "Steps of the engine"),
    "num_prefill_tokens": ("tokens", "engine_prefill_tokens", "Prompt tokens computed in steps"),
    "num_decoded_sequences": ("sequences", "engine_decoded_sequences", "Sequences that decoded in steps"),
    "num_draft_tokens": ("tokens", "spec_decode_num_draft_tokens", "Tokens guessed by prompt lookup"),
    "num_accepted_tokens": ("tokens", "spec_decode_num_accepted_tokens", "Tokens guessed right by prompt lookup"),
}
"""Unit, name and description of the counter for each of the engine's own counts."""
MAX_API_KEYS = 100
"""Keys with their own series. All others share OTHER_KEYS, which is no valid key name."""
OTHER_KEYS = "(others)"

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5)
_STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)

_requests, _tokens, _items, _bytes = (partial(Counter, unit) for unit in ("requests", "tokens", "items", "bytes"))
_latency, _token_latency = (partial(Histogram, "s", one) for one in (_LATENCY_BUCKETS, _TOKEN_LATENCY_BUCKETS))
_token_histogram = partial(Histogram, "tokens", _TOKEN_BUCKETS)


class ReplicaMetrics:
    def __init__(self) -> None:
        self.starts = Counter("replicas", "replica_starts", "Replicas started")
        self.start_time = Gauge("s since 1970", "replica_start_time_seconds", "Start time of the replica")
        self.build_info = Gauge("1", "build_info", "Software versions of the replica", "version", "ray_version")

    def report_start(self) -> None:
        self.starts.inc()
        self.start_time.set(time.time())
        self.build_info.set(1, version=raylens.__version__, ray_version=ray.__version__)


class RequestTimes:
    """Durations of whole requests and of their parts."""

    def __init__(self, models: Sequence[str]) -> None:
        model: dict[str, Sequence[str]] = {"model": models}
        modality = {**model, "modality": FIRST_MODALITIES}
        cached = {**modality, "cached": ("yes", "no")}
        self.time_to_first_token = _latency("time_to_first_token_seconds", "From arrival to the first token", **cached)
        self.inter_token_latency = _token_latency(
            "inter_token_latency_seconds", "Each gap between two tokens", **modality
        )
        self.time_per_output_token = _token_latency(
            "request_time_per_output_token_seconds", "A request's mean gap between tokens", **model
        )
        self.e2e_latency = _latency("e2e_request_latency_seconds", "From arrival to the last token", **cached)
        self.queue_time = _latency("request_queue_time_seconds", "Waiting time in the engine", **model)
        self.prefill_time = _latency("request_prefill_time_seconds", "From the first step to the first token", **model)
        self.decode_time = _latency("request_decode_time_seconds", "From the first token to the last", **model)
        stages = {"stage": WATERFALL}
        self.stage_seconds = Histogram("s", _STAGE_BUCKETS, "request_stage_seconds", "The stage waterfall", **stages)


class ApiKeyUse:
    def __init__(self, api_keys: Sequence[str]) -> None:
        names = api_keys[:MAX_API_KEYS]
        self._named = set(names)
        self.requests = _requests("api_key_requests", "Requests by API key", api_key=names)
        self.prompt_tokens = _tokens("api_key_prompt_tokens", "Prompt tokens by API key", api_key=names)
        self.generation_tokens = _tokens("api_key_generation_tokens", "Generated tokens by API key", api_key=names)

    def label(self, api_key: str) -> str:
        """Returns the label of an API key: its name, or OTHER_KEYS once MAX_API_KEYS keys have series."""
        if len(self._named) < MAX_API_KEYS:
            self._named.add(api_key)
        return api_key if api_key in self._named else OTHER_KEYS


class EndpointState:
    """The endpoint's queues, admission budgets, and view of the stages."""

    def __init__(self) -> None:
        self.open_http_requests = Gauge("requests", "open_http_requests", "Unanswered requests and open streams")
        self.admission_waiting = Gauge("requests", "admission_waiting_requests", "Requests that wait for room")
        unit = "of the resource"
        self.admission_used = Gauge(unit, "admission_used", "Budget in use by this replica's requests", "resource")
        self.admission_limit = Gauge(unit, "admission_limit", "Budget of all replicas together", "resource")
        self.lost_nodes = Gauge("nodes", "lost_nodes", "Nodes that ended without a drain or a signal to stop")
        self.stage_ready = Gauge("1 or 0", "stage_ready", "1 if the stage is ready", "model", "stage")
        self.stage_heartbeat_age = Gauge(
            "s", "stage_heartbeat_age_seconds", "Time since the stage's last heartbeat", "model", "stage"
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
        self.prompt_tokens = _tokens("prompt_tokens", "Prompt tokens, counted with the first token", model=models)
        self.prompt_tokens_cached = _tokens(
            "prompt_tokens_cached", "Prompt tokens found in the prefix cache", model=models
        )
        self.generation_tokens = _tokens("generation_tokens", "Generated tokens, counted when sent", model=models)
        reasons = ("stop", "length", "abort")
        self.request_success = _requests(
            "request_success", "Ended requests; abort: the client left", model=models, finished_reason=reasons
        )
        self.requests_within_slo = _requests(
            "requests_within_slo", "Ended requests within the SLO of the settings", model=models
        )
        self.request_errors = _requests("request_errors", "Failed requests", stage=(), code=())
        for stage, code in errors:
            self.request_errors.of(stage=stage, code=code)
        self.admission_rejections = _requests(
            "admission_rejections", "Refused requests, by the exhausted resource", reason=ADMISSION_REASONS
        )
        self.items_recomputed = _items_recomputed()
        self.request_prompt_tokens = _token_histogram(
            "request_prompt_tokens", "Prompt tokens of a request", model=models
        )
        self.request_generation_tokens = _token_histogram(
            "request_generation_tokens", "Generated tokens of a request", model=models
        )
        self.mm_items = _items("mm_items", "Media items, counted with the first token", modality=ITEM_MODALITIES)
        self.mm_media_download_bytes = _bytes("mm_media_download_bytes", "Media fetched from URLs")

    def count_error(self, stage: str, code: str) -> None:
        self.request_errors.inc(stage=stage, code=code)

    def count_rejection(self, reason: str) -> None:
        self.admission_rejections.inc(reason=reason)


class ItemMetrics:
    """The metrics of a shard: both caches, their contents, and uploaded files."""

    def __init__(self) -> None:
        self.items_recomputed = _items_recomputed()
        self.object_store_transfer_bytes = _bytes(
            "object_store_transfer_bytes", "Tensors passed between stages by reference", edge=EDGES
        )
        self.mm_cache = CacheMetrics("mm_cache")
        self.encoder_cache = CacheMetrics("encoder_cache")
        self.items_in_progress = Gauge("items", "items_in_progress", "Items in Preprocess or Encode")
        self.uploads_files = Gauge("files", "uploads_files", "Uploaded files kept")
        self.uploads_bytes = Gauge("bytes", "uploads_bytes", "Size of the uploaded files")


def _items_recomputed() -> Counter:
    return Counter(
        "calls",
        "items_recomputed",
        "Calls repeated after a lost replica or lost data",
        stage=STAGES,
        reason=("ActorDiedError",),
    )


class CacheMetrics:
    """The metrics of one cache: its queries, hits and evictions in items, and its size in bytes."""

    def __init__(self, name: str) -> None:
        modality = ITEM_MODALITIES
        self.queries = _items(f"{name}_queries", "Items looked up", modality=modality)
        self.hits = _items(f"{name}_hits", "Items found", modality=modality)
        self.evictions = _items(f"{name}_evictions", "Items evicted to make room", modality=modality)
        self.num_bytes = Gauge("bytes", f"{name}_bytes", "Size of the cached items")
        self.capacity_bytes = Gauge("bytes", f"{name}_capacity_bytes", "Limit of this size")

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
        self.pending_pixels = Gauge("pixels", "preprocess_pending_pixels", "Pixels in work or waiting")
        self.waiting_items = Gauge("items", "preprocess_waiting_items", "Items that wait for the processor")
        self.items_total = _items(
            "preprocess_items_total", "Items processed", modality=ITEM_MODALITIES, status=("ok", "error")
        )


class RemoteBytes:
    """The bytes that a stage received from other nodes."""

    def __init__(self, edge: str) -> None:
        self._edge = edge
        self._counter = _bytes("node_transfer_bytes", "Tensors received from another node", edge=(edge,))

    def inc(self, num_bytes: int) -> None:
        self._counter.inc(num_bytes, edge=self._edge)


class EncodeMetrics:
    def __init__(self) -> None:
        self.batch_size = Histogram("items", _BATCH_BUCKETS, "encoder_batch_size", "Size of each item's batch")
        status = ("ok", "error", "aborted")
        self.items_total = _items("encoder_items_total", "Items encoded", modality=ITEM_MODALITIES, status=status)
        self.waiting_items = Gauge("items", "encoder_waiting_items", "Items that wait for a batch")
        self.waiting_patches = Gauge("patches", "encoder_waiting_patches", "Patches that wait for a batch")
        self.remote_bytes = RemoteBytes("preprocess_encode")


class GenerateMetrics:
    def __init__(self) -> None:
        self.num_running = Gauge("sequences", "num_requests_running", "Sequences in the running batch")
        self.num_waiting = Gauge("sequences", "num_requests_waiting", "Sequences that wait for a place in the batch")
        self.num_lacking_tokens = Gauge("tokens", "waiting_prompt_tokens", "Prompt tokens to compute")
        self.kv_cache_usage = Gauge("0 to 1", "kv_cache_usage_perc", "Share of the KV cache in use")
        self.counts = {name: Counter(*definition) for name, definition in _ENGINE_COUNTS.items()}
        self.step_seconds = Counter("s", "engine_step_seconds", "Time of the parts of steps", part=STEP_PARTS)
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
