"""Computes a Snapshot from two pages of metrics. `deployments/metrics/` defines the names."""

from collections import defaultdict, deque
from typing import NamedTuple

from raylens.deployments.operator import snapshot
from raylens.deployments.operator.metrics_page import MetricsPage

WINDOW_SECONDS = 10.0
_LATENCIES = {
    "TTFT": "time_to_first_token_seconds",
    "ITL": "inter_token_latency_seconds",
    "whole request": "e2e_request_latency_seconds",
}


class _Kind(NamedTuple):
    """A kind of work: the gauges of waiting and running work, and the counters of finished work, in `unit`."""

    name: str
    unit: str
    waiting: str | None
    in_work: str | None
    done: tuple[str, ...]


_KINDS = (
    _Kind("requests", "requests", "admission_waiting_requests", "open_http_requests", ("request_success_total",)),
    _Kind("items", "items", None, "items_in_progress", ("encoder_cache_queries_total",)),
    _Kind("preprocess", "items", "preprocess_waiting_items", None, ("preprocess_items_total",)),
    _Kind("encode", "items", "encoder_waiting_items", None, ("encoder_items_total",)),
    _Kind(
        "generate",
        "tokens",
        "num_requests_waiting",
        "num_requests_running",
        ("engine_decoded_sequences_total", "spec_decode_num_accepted_tokens_total"),
    ),
)
"""A deployment has the kinds that it counts: with `encode.placement: inline`, the engine also encodes."""
_ENGINE_GAUGES = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "waiting_prompt_tokens")
_RESOURCES = ("requests", "bytes", "pixels", "tokens")
_MAX_KEYS = 10


class RecentPages:
    """Keeps the pages of the last `window_s` seconds, whose growth the views show, so that figures move steadily."""

    def __init__(self, window_s: float = WINDOW_SECONDS) -> None:
        self._window_s = window_s
        self._pages: deque[tuple[float, MetricsPage]] = deque()

    def add(self, page: MetricsPage, now: float) -> snapshot.Snapshot | None:
        """Returns the snapshot since the latest page that is at least the window older, else since the oldest page.
        None without an earlier page, or after a pause of twice the window. `now`: monotonic seconds of the reading."""
        while len(self._pages) > 1 and self._pages[1][0] <= now - self._window_s:
            self._pages.popleft()
        age = self.age(now)
        if age is not None and age > 2 * self._window_s:
            self._pages.clear()
        self._pages.append((now, page))
        began, first = self._pages[0]
        return summarize(first, page, now - began) if len(self._pages) > 1 else None

    def age(self, now: float) -> float | None:
        """Returns the seconds since the newest page was read, None without a page."""
        return now - self._pages[-1][0] if self._pages else None


class _Window(NamedTuple):
    """The page at the window's end, the growth within the window, and its seconds."""

    now: MetricsPage
    grown: MetricsPage
    seconds: float

    def total(self, name: str) -> int:
        return int(self.now.sum(name))

    def per_s(self, name: str, **labels: str) -> float:
        return self.grown.sum(name, **labels) / self.seconds


def summarize(earlier: MetricsPage, now: MetricsPage, seconds: float) -> snapshot.Snapshot:
    """`seconds`: the time between the pages."""
    window = _Window(now, now.since(earlier), seconds)
    return snapshot.Snapshot(
        version=next((labels["version"] for labels, _ in now.values("build_info")), ""),
        seconds=seconds,
        requests=_requests(window),
        tokens=snapshot.Tokens(
            generated=window.total("generation_tokens_total"),
            generated_per_s=window.per_s("generation_tokens_total"),
            prompt_per_s=window.per_s("prompt_tokens_total"),
        ),
        latencies=[
            snapshot.Latency(name, *(window.grown.quantile(metric, share) for share in (0.5, 0.99)))
            for name, metric in _LATENCIES.items()
        ],
        stages=_stages(now),
        deployments=_deployments(window),
        replicas=_replicas(now),
        caches=[
            _item_cache("items", "mm_cache", window),
            _item_cache("embeddings", "encoder_cache", window),
            _prefix_cache(window),
        ],
        budgets=_budgets(now),
        waiting_for_room=window.total("admission_waiting_requests"),
        keys=_keys(window),
        preemptions=window.total("num_preemptions_total"),
        recomputed=window.total("items_recomputed_total"),
        uploaded_files=window.total("uploads_files"),
        uploaded_bytes=now.sum("uploads_bytes"),
    )


def _requests(window: _Window) -> snapshot.Requests:
    per_s, errors_per_s = window.per_s("request_success_total"), window.per_s("request_errors_total")
    goodput = window.per_s("requests_within_slo_total")
    rejections = window.grown.sums("admission_rejections_total", "reason")
    return snapshot.Requests(
        ended=window.total("request_success_total"),
        errors=window.total("request_errors_total"),
        per_s=per_s,
        errors_per_s=errors_per_s,
        error_ratio=_ratio(errors_per_s, per_s + errors_per_s),
        goodput=goodput,
        goodput_ratio=_ratio(goodput, per_s),
        rejections={reason: int(count) for reason, count in sorted(rejections.items()) if count},
    )


def _stages(now: MetricsPage) -> list[snapshot.Stage]:
    """Several ingress replicas watch the same stages. A stage is ready if all replicas report so."""
    ready: dict[tuple[str, str], bool] = {}
    for labels, is_ready in now.values("stage_ready"):
        key = labels.get("model", ""), labels["stage"]
        ready[key] = bool(is_ready) and ready.get(key, True)
    ages: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for labels, age in now.values("stage_heartbeat_age_seconds"):
        if age >= 0:
            ages[labels.get("model", ""), labels["stage"]].append(age)
    has_one_model = len({model for model, _ in ready}) < 2
    return [
        snapshot.Stage("" if has_one_model else model, name, ready[model, name], min(ages[model, name], default=None))
        for model, name in sorted(ready, key=lambda key: (key[0], _place(key[1].capitalize())))
    ]


def _deployments(window: _Window) -> list[snapshot.Deployment]:
    found = []
    starts = window.now.sums("replica_starts_total", "deployment")
    for name in sorted(starts, key=_place):
        replicas = len(window.now.values("replica_start_time_seconds", deployment=name))
        works = [_work(kind, name, window) for kind in _KINDS if window.now.values(kind.done[0], deployment=name)]
        found.append(snapshot.Deployment(name, replicas, max(0, int(starts[name]) - replicas), works))
    return found


def _work(kind: _Kind, deployment: str, window: _Window) -> snapshot.Work:
    def gauge(name: str | None) -> float | None:
        return None if name is None else window.now.sum(name, deployment=deployment)

    per_s = sum(window.per_s(name, deployment=deployment) for name in kind.done)
    return snapshot.Work(kind.name, gauge(kind.waiting), gauge(kind.in_work), per_s, kind.unit)


def _place(deployment: str) -> tuple[int, str]:
    """Sort key: the order of a request's path."""
    kinds = ("Ingress", "Shared", "Preprocess", "Encode", "Generate")
    kind = deployment.partition("-")[0]
    return kinds.index(kind) if kind in kinds else len(kinds), deployment


def _replicas(now: MetricsPage) -> list[snapshot.Replica]:
    def by_replica(name: str) -> dict[tuple[str, str], float]:
        return {(labels["deployment"], labels["replica"]): value for labels, value in now.values(name)}

    usage, *counts = (by_replica(name) for name in _ENGINE_GAUGES)
    found = []
    for labels, started_at in now.values("replica_start_time_seconds"):
        own = labels["deployment"], labels["replica"]
        gauges = (int(count.get(own, 0)) if own in usage else None for count in counts)
        found.append(snapshot.Replica(*own, labels.get("node", ""), started_at, usage.get(own), *gauges))
    return sorted(found, key=lambda replica: (_place(replica.deployment), replica.started_at, replica.name))


def _item_cache(name: str, metric: str, window: _Window) -> snapshot.Cache:
    num_bytes, capacity = window.now.sum(f"{metric}_bytes"), window.now.sum(f"{metric}_capacity_bytes")
    sizes = num_bytes, capacity, _ratio(num_bytes, capacity)
    return snapshot.Cache(name, "items", *_hits(metric, window), window.total(f"{metric}_evictions_total"), *sizes)


def _prefix_cache(window: _Window) -> snapshot.Cache:
    """The prefix cache's blocks are in the KV caches. `usage`: mean usage of the KV caches."""
    metric = "kv_cache_usage_perc"
    usage = _ratio(window.now.sum(metric), len(window.now.values(metric)))
    return snapshot.Cache("prefixes", "tokens", *_hits("prefix_cache", window), None, None, None, usage)


def _hits(metric: str, window: _Window) -> tuple[float | None, float]:
    """Returns a cache's hit ratio and queries per second."""
    queries = f"{metric}_queries_total"
    return _ratio(window.grown.sum(f"{metric}_hits_total"), window.grown.sum(queries)), window.per_s(queries)


def _budgets(now: MetricsPage) -> list[snapshot.Budget]:
    """Each ingress replica reports the total limit, and its own requests' use."""
    limits: dict[str, float] = {}
    for labels, limit in now.values("admission_limit"):
        limits[labels["resource"]] = max(limit, limits.get(labels["resource"], 0.0))
    used = now.sums("admission_used", "resource")
    return [snapshot.Budget(name, used.get(name, 0.0), limits[name]) for name in _RESOURCES if name in limits]


def _keys(window: _Window) -> list[snapshot.KeyUse]:
    """Returns the keys with the most tokens in the window, then since the start."""

    def tokens(page: MetricsPage) -> dict[str, float]:
        prompt, generated = (page.sums(f"api_key_{kind}_tokens_total", "api_key") for kind in ("prompt", "generation"))
        return {key: prompt.get(key, 0.0) + generated.get(key, 0.0) for key in prompt.keys() | generated.keys()}

    requests, new_requests = (page.sums("api_key_requests_total", "api_key") for page in (window.now, window.grown))
    all_tokens, new_tokens = tokens(window.now), tokens(window.grown)
    uses = [
        snapshot.KeyUse(
            name=key,
            requests=int(count),
            tokens=int(all_tokens.get(key, 0.0)),
            requests_per_s=new_requests.get(key, 0.0) / window.seconds,
            tokens_per_s=new_tokens.get(key, 0.0) / window.seconds,
        )
        for key, count in requests.items()
    ]
    return sorted(uses, key=lambda use: (-use.tokens_per_s, -use.tokens, use.name))[:_MAX_KEYS]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
