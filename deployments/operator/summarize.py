"""Computes a Snapshot from two pages of metrics. `deployments/metrics/` defines the names."""

from typing import NamedTuple

from raylens.deployments.operator.metrics_page import MetricsPage
from raylens.deployments.operator.snapshot import (
    Budget,
    Cache,
    Deployment,
    KeyUse,
    Latency,
    Replica,
    Requests,
    Snapshot,
    Stage,
    Tokens,
    Work,
)

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


def summarize(earlier: MetricsPage, now: MetricsPage, seconds: float) -> Snapshot:
    """`seconds`: the time between the pages."""
    grown = now.since(earlier)
    return Snapshot(
        version=next((labels["version"] for labels, _ in now.values("build_info")), ""),
        seconds=seconds,
        requests=_requests(now, grown, seconds),
        tokens=Tokens(
            generated=int(now.sum("generation_tokens_total")),
            generated_per_s=grown.sum("generation_tokens_total") / seconds,
            prompt_per_s=grown.sum("prompt_tokens_total") / seconds,
        ),
        latencies=[
            Latency(name, grown.quantile(metric, 0.5), grown.quantile(metric, 0.99))
            for name, metric in _LATENCIES.items()
        ],
        stages=_stages(now),
        deployments=_deployments(now, grown, seconds),
        replicas=_replicas(now),
        caches=[
            _item_cache("items", "mm_cache", now, grown, seconds),
            _item_cache("embeddings", "encoder_cache", now, grown, seconds),
            _prefix_cache(now, grown, seconds),
        ],
        budgets=_budgets(now),
        waiting_for_room=int(now.sum("admission_waiting_requests")),
        keys=_keys(now, grown, seconds),
        preemptions=int(now.sum("num_preemptions_total")),
        recomputed=int(now.sum("items_recomputed_total")),
        uploaded_files=int(now.sum("uploads_files")),
        uploaded_bytes=now.sum("uploads_bytes"),
    )


def _requests(now: MetricsPage, grown: MetricsPage, seconds: float) -> Requests:
    ended, errors = grown.sum("request_success_total"), grown.sum("request_errors_total")
    goodput = grown.sum("requests_within_slo_total")
    rejections = grown.sums("admission_rejections_total", "reason")
    return Requests(
        ended=int(now.sum("request_success_total")),
        errors=int(now.sum("request_errors_total")),
        per_s=ended / seconds,
        errors_per_s=errors / seconds,
        error_ratio=_ratio(errors, ended + errors),
        goodput=goodput / seconds,
        goodput_ratio=_ratio(goodput, ended),
        rejections={reason: int(count) for reason, count in sorted(rejections.items()) if count},
    )


def _stages(now: MetricsPage) -> list[Stage]:
    """Several ingress replicas watch the same stages. A stage is ready if all replicas report so."""
    stages: dict[tuple[str, str], Stage] = {}
    has_one_model = len(now.sums("stage_ready", "model")) < 2
    for labels, ready in now.values("stage_ready"):
        model, name = labels.get("model", ""), labels["stage"]
        before = stages.get((model, name))
        ages = [
            age
            for own, age in now.values("stage_heartbeat_age_seconds", stage=name)
            if own.get("model", "") == model and age >= 0
        ]
        is_ready = bool(ready) and (before is None or before.is_ready)
        stages[model, name] = Stage("" if has_one_model else model, name, is_ready, min(ages, default=None))
    return [stages[key] for key in sorted(stages, key=lambda key: (key[0], _place(key[1].capitalize())))]


def _deployments(now: MetricsPage, grown: MetricsPage, seconds: float) -> list[Deployment]:
    found = []
    starts = now.sums("replica_starts_total", "deployment")
    for name in sorted(starts, key=_place):
        replicas = len(now.values("replica_start_time_seconds", deployment=name))
        works = [_work(kind, name, now, grown, seconds) for kind in _KINDS if now.has(kind.done[0], deployment=name)]
        found.append(Deployment(name, replicas, max(0, int(starts[name]) - replicas), works))
    return found


def _work(kind: _Kind, deployment: str, now: MetricsPage, grown: MetricsPage, seconds: float) -> Work:
    def gauge(name: str | None) -> float | None:
        return None if name is None else now.sum(name, deployment=deployment)

    done = sum(grown.sum(name, deployment=deployment) for name in kind.done)
    return Work(kind.name, gauge(kind.waiting), gauge(kind.in_work), done / seconds, kind.unit)


def _place(deployment: str) -> tuple[int, str]:
    """Sort key: the order of a request's path."""
    kinds = ("Ingress", "Shared", "Preprocess", "Encode", "Generate")
    kind = deployment.partition("-")[0]
    return kinds.index(kind) if kind in kinds else len(kinds), deployment


def _replicas(now: MetricsPage) -> list[Replica]:
    def by_replica(name: str) -> dict[tuple[str, str], float]:
        return {(labels["deployment"], labels["replica"]): value for labels, value in now.values(name)}

    usage, running, waiting, tokens = (by_replica(name) for name in _ENGINE_GAUGES)
    found = []
    for labels, started_at in now.values("replica_start_time_seconds"):
        own = labels["deployment"], labels["replica"]
        replica = Replica(*own, labels.get("node", ""), started_at, None, None, None, None)
        if own in usage:
            gauges = (int(gauge.get(own, 0)) for gauge in (running, waiting, tokens))
            replica = Replica(*own, replica.node, started_at, usage[own], *gauges)
        found.append(replica)
    return sorted(found, key=lambda replica: (_place(replica.deployment), replica.started_at, replica.name))


def _item_cache(name: str, metric: str, now: MetricsPage, grown: MetricsPage, seconds: float) -> Cache:
    num_bytes, capacity = now.sum(f"{metric}_bytes"), now.sum(f"{metric}_capacity_bytes")
    queries = grown.sum(f"{metric}_queries_total")
    return Cache(
        name=name,
        unit="items",
        queries=int(now.sum(f"{metric}_queries_total")),
        hits=int(now.sum(f"{metric}_hits_total")),
        hit_ratio=_ratio(grown.sum(f"{metric}_hits_total"), queries),
        queries_per_s=queries / seconds,
        evictions=int(now.sum(f"{metric}_evictions_total")),
        num_bytes=num_bytes,
        capacity_bytes=capacity,
        usage=_ratio(num_bytes, capacity),
    )


def _prefix_cache(now: MetricsPage, grown: MetricsPage, seconds: float) -> Cache:
    """The prefix cache has no size of its own, because its blocks are in the KV caches. `usage`: mean usage of the KV
    caches."""
    queries = grown.sum("prefix_cache_queries_total")
    return Cache(
        name="prefixes",
        unit="tokens",
        queries=int(now.sum("prefix_cache_queries_total")),
        hits=int(now.sum("prefix_cache_hits_total")),
        hit_ratio=_ratio(grown.sum("prefix_cache_hits_total"), queries),
        queries_per_s=queries / seconds,
        evictions=None,
        num_bytes=None,
        capacity_bytes=None,
        usage=_ratio(now.sum("kv_cache_usage_perc"), len(now.values("kv_cache_usage_perc"))),
    )


def _budgets(now: MetricsPage) -> list[Budget]:
    """Each ingress replica reports the total limit, and its own requests' use."""
    limits: dict[str, float] = {}
    for labels, limit in now.values("admission_limit"):
        limits[labels["resource"]] = max(limit, limits.get(labels["resource"], 0.0))
    used = now.sums("admission_used", "resource")
    told = [resource for resource in _RESOURCES if resource in limits]
    return [Budget(resource, used.get(resource, 0.0), limits[resource]) for resource in told]


def _keys(now: MetricsPage, grown: MetricsPage, seconds: float) -> list[KeyUse]:
    """Returns the keys with the most tokens in the window, then since the start."""

    def tokens(page: MetricsPage) -> dict[str, float]:
        prompt, generated = (page.sums(f"api_key_{kind}_tokens_total", "api_key") for kind in ("prompt", "generation"))
        return {key: prompt.get(key, 0.0) + generated.get(key, 0.0) for key in prompt.keys() | generated.keys()}

    requests, new_requests = (page.sums("api_key_requests_total", "api_key") for page in (now, grown))
    all_tokens, new_tokens = tokens(now), tokens(grown)
    uses = [
        KeyUse(
            name=key,
            requests=int(count),
            tokens=int(all_tokens.get(key, 0.0)),
            requests_per_s=new_requests.get(key, 0.0) / seconds,
            tokens_per_s=new_tokens.get(key, 0.0) / seconds,
        )
        for key, count in requests.items()
    ]
    return sorted(uses, key=lambda use: (-use.tokens_per_s, -use.tokens, use.name))[:_MAX_KEYS]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
