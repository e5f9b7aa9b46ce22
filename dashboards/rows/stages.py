"""A row for each stage, in a request's order."""

from dashboards.panels import Panel, Query, Row
from dashboards.promql import APPLICATION, DEPLOYMENT, REPLICA, counted, of_replicas, quantile, series, share

INGRESS = Row(
    "Ingress",
    (
        Panel(
            "Open requests",
            "short",
            (
                Query(of_replicas("open_http_requests"), "open"),
                Query(of_replicas("admission_waiting_requests"), "waiting for room"),
            ),
        ),
        Panel(
            "Budgets in use",
            "percentunit",
            (
                Query(
                    share(
                        of_replicas("admission_used", "resource"),
                        f"max by (resource) ({series('admission_limit', APPLICATION)})",
                    ),
                    "{{resource}}",
                ),
            ),
            "The part of each admission budget that all requests together use.",
            limit=1.0,
        ),
        Panel("Refused for want of room", "reqps", (Query(counted("admission_rejections", "reason"), "{{reason}}"),)),
        Panel("Media items", "ops", (Query(counted("mm_items", "modality"), "{{modality}}"),)),
        Panel("Media fetched", "Bps", (Query(counted("mm_media_download_bytes"), "from URLs"),)),
        Panel(
            "Signs of life",
            "s",
            (
                Query(
                    f"max by (model, stage) ({series('stage_heartbeat_age_seconds', REPLICA)})",
                    "{{model}} {{stage}}",
                ),
            ),
            "Time since each stage's last heartbeat: the longest of all replicas of the ingress.",
        ),
        Panel(
            "Stages ready",
            "short",
            (Query(f"min by (model, stage) ({series('stage_ready', REPLICA)})", "{{model}} {{stage}}"),),
            "1: every replica of the ingress finds the stage ready.",
        ),
    ),
    columns=4,
)

PREPROCESS = Row(
    "Preprocess",
    (
        Panel(
            "Items processed",
            "ops",
            (Query(counted("preprocess_items", "modality", "status"), "{{modality}} {{status}}"),),
        ),
        Panel(
            "Items waiting for the processor",
            "short",
            (Query(of_replicas("preprocess_waiting_items", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Pixels in work",
            "short",
            (Query(of_replicas("preprocess_pending_pixels", "replica"), "{{replica}}"),),
            "Autoscaling of the stage uses the sum.",
            stacked=True,
        ),
    ),
)

ENCODE = Row(
    "Encode",
    (
        Panel(
            "Items encoded",
            "ops",
            (Query(counted("encoder_items", "modality", "status"), "{{modality}} {{status}}"),),
        ),
        Panel(
            "Items encoded together",
            "short",
            tuple(
                Query(quantile(q, "encoder_batch_size", DEPLOYMENT, "deployment"), f"{{{{deployment}}}} p{q * 100:.0f}")
                for q in (0.5, 0.95)
            ),
        ),
        Panel(
            "Items waiting for a batch",
            "short",
            (Query(of_replicas("encoder_waiting_items", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Patches waiting for a batch",
            "short",
            (Query(of_replicas("encoder_waiting_patches", "replica"), "{{replica}}"),),
        ),
    ),
    columns=4,
)

_STEPS = counted("engine_steps", "deployment")

GENERATE = Row(
    "Generate",
    (
        Panel(
            "Sequences",
            "short",
            (
                Query(of_replicas("num_requests_running", "replica"), "{{replica}} running"),
                Query(of_replicas("num_requests_waiting", "replica"), "{{replica}} waiting"),
            ),
        ),
        Panel(
            "Prompt tokens to be computed",
            "short",
            (Query(of_replicas("waiting_prompt_tokens", "replica"), "{{replica}}"),),
        ),
        Panel(
            "A step of the engine",
            "s",
            (
                Query(
                    f"{counted('engine_step_seconds', 'deployment', 'part')}"
                    f" / on (deployment) group_left () ({_STEPS} > 0)",
                    "{{deployment}} {{part}}",
                ),
            ),
            "The mean of each part. Each decoding sequence gets a token in each step.",
            stacked=True,
        ),
        Panel(
            "In a step",
            "short",
            (
                Query(share(counted("engine_prefill_tokens", "deployment"), _STEPS), "{{deployment}} prompt tokens"),
                Query(share(counted("engine_decoded_sequences", "deployment"), _STEPS), "{{deployment}} sequences"),
            ),
            "Means: computed prompt tokens, and sequences that got a token.",
        ),
        Panel(
            "Engine at work",
            "percentunit",
            (Query(counted("engine_step_seconds", "deployment"), "{{deployment}}"),),
            "Seconds of steps per second, summed over all replicas.",
        ),
        Panel(
            "Prompt lookup",
            "cps",
            (
                Query(counted("spec_decode_num_draft_tokens"), "guessed"),
                Query(counted("spec_decode_num_accepted_tokens"), "of these, right"),
            ),
            "Tokens. 0 without prompt lookup.",
        ),
    ),
)

KV_CACHE = Row(
    "KV cache",
    (
        Panel(
            "KV cache in use",
            "percentunit",
            (Query(of_replicas("kv_cache_usage_perc", "replica"), "{{replica}}"),),
            limit=1.0,
        ),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            (
                Query(
                    share(counted("prefix_cache_hits", "deployment"), counted("prefix_cache_queries", "deployment")),
                    "{{deployment}}",
                ),
            ),
        ),
        Panel(
            "Preemptions",
            "ops",
            (Query(counted("num_preemptions", "deployment"), "{{deployment}}"),),
            "Sequences that lost their blocks to others and are recomputed.",
        ),
    ),
)
