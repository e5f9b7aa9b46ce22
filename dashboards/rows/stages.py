"""A row for each stage, in a request's order."""

from dashboards.panels import BytesPerSecond, Count, PerSecond, RequestsPerSecond, Row, Seconds, Share, TokensPerSecond
from dashboards.promql import APPLICATION, DEPLOYMENT, REPLICA, counted, of_replicas, quantile, series, share


def _by_replica(gauge: str, legend: str = "") -> dict[str, str]:
    return {f"{{{{replica}}}} {legend}".strip(): of_replicas(gauge, "replica")}


_LIMIT = f"max by (resource) ({series('admission_limit', APPLICATION)})"

INGRESS = Row(
    "Ingress",
    Count(
        "Open requests",
        {"open": of_replicas("open_http_requests"), "waiting for room": of_replicas("admission_waiting_requests")},
    ),
    Share(
        "Budgets in use",
        {"{{resource}}": share(of_replicas("admission_used", "resource"), _LIMIT)},
        "The part of each admission budget that all requests together use.",
        limit=1.0,
    ),
    RequestsPerSecond("Refused for want of room", {"{{reason}}": counted("admission_rejections", "reason")}),
    PerSecond("Media items", {"{{modality}}": counted("mm_items", "modality")}),
    BytesPerSecond("Media fetched", {"from URLs": counted("mm_media_download_bytes")}),
    Seconds(
        "Signs of life",
        {"{{model}} {{stage}}": f"max by (model, stage) ({series('stage_heartbeat_age_seconds', REPLICA)})"},
        "Time since each stage's last heartbeat: the longest of all replicas of the ingress.",
    ),
    Count(
        "Stages ready",
        {"{{model}} {{stage}}": f"min by (model, stage) ({series('stage_ready', REPLICA)})"},
        "1: every replica of the ingress finds the stage ready.",
    ),
    columns=4,
)

PREPROCESS = Row(
    "Preprocess",
    PerSecond("Items processed", {"{{modality}} {{status}}": counted("preprocess_items", "modality", "status")}),
    Count("Items waiting for the processor", _by_replica("preprocess_waiting_items")),
    Count(
        "Pixels in work",
        _by_replica("preprocess_pending_pixels"),
        "Autoscaling of the stage uses the sum.",
        stacked=True,
    ),
)

ENCODE = Row(
    "Encode",
    PerSecond("Items encoded", {"{{modality}} {{status}}": counted("encoder_items", "modality", "status")}),
    Count(
        "Items encoded together",
        {
            f"{{{{deployment}}}} p{q * 100:.0f}": quantile(q, "encoder_batch_size", DEPLOYMENT, "deployment")
            for q in (0.5, 0.95)
        },
    ),
    Count("Items waiting for a batch", _by_replica("encoder_waiting_items")),
    Count("Patches waiting for a batch", _by_replica("encoder_waiting_patches")),
    columns=4,
)

_STEPS = counted("engine_steps", "deployment")
_PART_SECONDS = counted("engine_step_seconds", "deployment", "part")
_HITS, _QUERIES = (counted(f"prefix_cache_{kind}", "deployment") for kind in ("hits", "queries"))

GENERATE = Row(
    "Generate",
    Count("Sequences", _by_replica("num_requests_running", "running") | _by_replica("num_requests_waiting", "waiting")),
    Count("Prompt tokens to be computed", _by_replica("waiting_prompt_tokens")),
    Seconds(
        "A step of the engine",
        {"{{deployment}} {{part}}": f"{_PART_SECONDS} / on (deployment) group_left () ({_STEPS} > 0)"},
        "The mean of each part. Each decoding sequence gets a token in each step.",
        stacked=True,
    ),
    Count(
        "In a step",
        {
            "{{deployment}} prompt tokens": share(counted("engine_prefill_tokens", "deployment"), _STEPS),
            "{{deployment}} sequences": share(counted("engine_decoded_sequences", "deployment"), _STEPS),
        },
        "Means: computed prompt tokens, and sequences that got a token.",
    ),
    Share(
        "Engine at work",
        {"{{deployment}}": counted("engine_step_seconds", "deployment")},
        "Seconds of steps per second, summed over all replicas.",
    ),
    TokensPerSecond(
        "Prompt lookup",
        {
            "guessed": counted("spec_decode_num_draft_tokens"),
            "of these, right": counted("spec_decode_num_accepted_tokens"),
        },
        "Tokens. 0 without prompt lookup.",
    ),
)

KV_CACHE = Row(
    "KV cache",
    Share("KV cache in use", _by_replica("kv_cache_usage_perc"), limit=1.0),
    Share(
        "Prompt tokens found in the prefix cache",
        {"{{deployment}}": share(_HITS, _QUERIES)},
    ),
    PerSecond(
        "Preemptions",
        {"{{deployment}}": counted("num_preemptions", "deployment")},
        "Sequences that lost their blocks to others and are recomputed.",
    ),
)
