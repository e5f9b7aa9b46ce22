"""A row for each stage, in a request's order."""

from dashboards.panels import Panel, Row
from dashboards.promql import APPLICATION, DEPLOYMENT, REPLICA, counted, of_replicas, quantile, series, share


def _by_replica(gauge: str, legend: str = "") -> dict[str, str]:
    return {f"{{{{replica}}}} {legend}".strip(): of_replicas(gauge, "replica")}


INGRESS = Row(
    "Ingress",
    Panel(
        "Open requests",
        "short",
        {"open": of_replicas("open_http_requests"), "waiting for room": of_replicas("admission_waiting_requests")},
    ),
    Panel(
        "Budgets in use",
        "percentunit",
        {
            "{{resource}}": share(
                of_replicas("admission_used", "resource"),
                f"max by (resource) ({series('admission_limit', APPLICATION)})",
            )
        },
        "The part of each admission budget that all requests together use.",
        limit=1.0,
    ),
    Panel("Refused for want of room", "reqps", {"{{reason}}": counted("admission_rejections", "reason")}),
    Panel("Media items", "ops", {"{{modality}}": counted("mm_items", "modality")}),
    Panel("Media fetched", "Bps", {"from URLs": counted("mm_media_download_bytes")}),
    Panel(
        "Signs of life",
        "s",
        {"{{model}} {{stage}}": f"max by (model, stage) ({series('stage_heartbeat_age_seconds', REPLICA)})"},
        "Time since each stage's last heartbeat: the longest of all replicas of the ingress.",
    ),
    Panel(
        "Stages ready",
        "short",
        {"{{model}} {{stage}}": f"min by (model, stage) ({series('stage_ready', REPLICA)})"},
        "1: every replica of the ingress finds the stage ready.",
    ),
    columns=4,
)

PREPROCESS = Row(
    "Preprocess",
    Panel("Items processed", "ops", {"{{modality}} {{status}}": counted("preprocess_items", "modality", "status")}),
    Panel("Items waiting for the processor", "short", _by_replica("preprocess_waiting_items")),
    Panel(
        "Pixels in work",
        "short",
        _by_replica("preprocess_pending_pixels"),
        "Autoscaling of the stage uses the sum.",
        stacked=True,
    ),
)

ENCODE = Row(
    "Encode",
    Panel("Items encoded", "ops", {"{{modality}} {{status}}": counted("encoder_items", "modality", "status")}),
    Panel(
        "Items encoded together",
        "short",
        {
            f"{{{{deployment}}}} p{q * 100:.0f}": quantile(q, "encoder_batch_size", DEPLOYMENT, "deployment")
            for q in (0.5, 0.95)
        },
    ),
    Panel("Items waiting for a batch", "short", _by_replica("encoder_waiting_items")),
    Panel("Patches waiting for a batch", "short", _by_replica("encoder_waiting_patches")),
    columns=4,
)

_STEPS = counted("engine_steps", "deployment")

GENERATE = Row(
    "Generate",
    Panel(
        "Sequences",
        "short",
        _by_replica("num_requests_running", "running") | _by_replica("num_requests_waiting", "waiting"),
    ),
    Panel("Prompt tokens to be computed", "short", _by_replica("waiting_prompt_tokens")),
    Panel(
        "A step of the engine",
        "s",
        {
            "{{deployment}} {{part}}": (
                f"{counted('engine_step_seconds', 'deployment', 'part')} / on (deployment) group_left () ({_STEPS} > 0)"
            )
        },
        "The mean of each part. Each decoding sequence gets a token in each step.",
        stacked=True,
    ),
    Panel(
        "In a step",
        "short",
        {
            "{{deployment}} prompt tokens": share(counted("engine_prefill_tokens", "deployment"), _STEPS),
            "{{deployment}} sequences": share(counted("engine_decoded_sequences", "deployment"), _STEPS),
        },
        "Means: computed prompt tokens, and sequences that got a token.",
    ),
    Panel(
        "Engine at work",
        "percentunit",
        {"{{deployment}}": counted("engine_step_seconds", "deployment")},
        "Seconds of steps per second, summed over all replicas.",
    ),
    Panel(
        "Prompt lookup",
        "cps",
        {
            "guessed": counted("spec_decode_num_draft_tokens"),
            "of these, right": counted("spec_decode_num_accepted_tokens"),
        },
        "Tokens. 0 without prompt lookup.",
    ),
)

KV_CACHE = Row(
    "KV cache",
    Panel("KV cache in use", "percentunit", _by_replica("kv_cache_usage_perc"), limit=1.0),
    Panel(
        "Prompt tokens found in the prefix cache",
        "percentunit",
        {
            "{{deployment}}": share(
                counted("prefix_cache_hits", "deployment"), counted("prefix_cache_queries", "deployment")
            )
        },
    ),
    Panel(
        "Preemptions",
        "ops",
        {"{{deployment}}": counted("num_preemptions", "deployment")},
        "Sequences that lost their blocks to others and are recomputed.",
    ),
)
