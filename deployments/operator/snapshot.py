"""The figures of `raylens top` and `/dashboard`. Rates are per second, sizes in bytes, times in seconds. A value
without data is None, such as a hit ratio without queries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Requests:
    """`ended` and `errors` count from the start. `error_ratio`: errors / (ended + errors). `goodput`: requests within
    the SLO settings. `rejections`: by admission, by reason."""

    ended: int
    errors: int
    per_s: float
    errors_per_s: float
    error_ratio: float | None
    goodput: float
    goodput_ratio: float | None
    rejections: dict[str, int]


@dataclass(frozen=True, slots=True)
class Tokens:
    """`generated` counts from the start."""

    generated: int
    generated_per_s: float
    prompt_per_s: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Estimates, by histogram."""

    name: str
    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Stage:
    """`model` is empty if there is only one. `heartbeat_age_s`: since the last sign of life."""

    model: str
    name: str
    is_ready: bool
    heartbeat_age_s: float | None


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of a deployment's work, with its queue. `per_s` is in `unit`."""

    name: str
    waiting: float | None
    in_work: float | None
    per_s: float
    unit: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """`replicas`: running now. `ended`: since the start, by scaling, a rollout or death."""

    name: str
    replicas: int
    ended: int
    works: list[Work]


@dataclass(frozen=True, slots=True)
class Replica:
    """The last four fields (KV cache's used share, sequences, prompt tokens to compute) are those of engines."""

    deployment: str
    name: str
    node: str
    started_at: float
    kv_usage: float | None
    running: int | None
    waiting: int | None
    waiting_prompt_tokens: int | None


@dataclass(frozen=True, slots=True)
class Cache:
    """`evictions` counts from the start. `usage`: used share of the capacity."""

    name: str
    unit: str
    hit_ratio: float | None
    queries_per_s: float
    evictions: int | None
    num_bytes: float | None
    capacity_bytes: float | None
    usage: float | None


@dataclass(frozen=True, slots=True)
class Budget:
    """The use of one admission resource, over all ingress replicas."""

    resource: str
    used: float
    limit: float


@dataclass(frozen=True, slots=True)
class KeyUse:
    """`requests` and `tokens` (of prompts and answers) count from the start."""

    name: str
    requests: int
    tokens: int
    requests_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`seconds`: the window. `preemptions` and `recomputed` (retried calls of a stage) count from the start."""

    version: str
    seconds: float
    requests: Requests
    tokens: Tokens
    latencies: list[Latency]
    stages: list[Stage]
    deployments: list[Deployment]
    replicas: list[Replica]
    caches: list[Cache]
    budgets: list[Budget]
    waiting_for_room: int
    keys: list[KeyUse]
    preemptions: int
    recomputed: int
    uploaded_files: int
    uploaded_bytes: float
