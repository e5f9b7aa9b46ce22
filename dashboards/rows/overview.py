"""Rows about whole requests: objectives, time by stage, and kinds of requests."""

from dashboards.objectives import ERRORS, FAILED, FIRST_TOKEN_SECONDS
from dashboards.panels import Panel, Query, Row
from dashboards.promql import APPLICATION, counted, mean, quantile, rate, series, share, share_or_zero
from raylens.deployments.metrics.waterfall_stages import WATERFALL as STAGES


def percentiles(histogram: str, *tags: str) -> tuple[Query, ...]:
    legend = "".join(f"{{{{{tag}}}}} " for tag in tags)
    return tuple(Query(quantile(q, histogram, APPLICATION, *tags), f"{legend}p{q * 100:.0f}") for q in (0.5, 0.99))


_ANSWERED = counted("request_success", of=APPLICATION)
# Codes without failures so far may have no series. The result is then 0 if requests are counted at all.
_FAILED = f"({rate(series('request_errors_total', APPLICATION, FAILED))} or 0 * {_ANSWERED})"
_ENDED = counted("request_success", "finished_reason", of=APPLICATION)

OBJECTIVES = Row(
    "Objectives",
    (
        Panel(
            "Time to first token",
            "s",
            percentiles("time_to_first_token_seconds"),
            "From a request's arrival to its first token. The line is the objective.",
            limit=FIRST_TOKEN_SECONDS,
        ),
        Panel(
            "Inter-token latency",
            "s",
            percentiles("inter_token_latency_seconds"),
            "Each gap between two tokens.",
        ),
        Panel(
            "Error ratio",
            "percentunit",
            (Query(share_or_zero(_FAILED, f"({_ANSWERED} + {_FAILED})"), "failed"),),
            "The share of admitted, valid requests that failed by the server's fault. The line is the objective.",
            limit=ERRORS.allowed,
        ),
        Panel(
            "Goodput",
            "reqps",
            (
                Query(counted("requests_within_slo", of=APPLICATION), "as fast as promised"),
                Query(_ANSWERED, "all"),
            ),
            "Requests answered within metrics.slo_time_to_first_token_s and metrics.slo_time_per_output_token_s.",
        ),
    ),
    columns=4,
)


def _mean_seconds(stage: str) -> str:
    """Returns the mean over all finished requests, or 0 without any."""
    seconds = rate(series("request_stage_seconds_sum", APPLICATION, f'stage="{stage}"'))
    return share_or_zero(seconds, rate(series("e2e_request_latency_seconds_count", APPLICATION)))


WATERFALL = Row(
    "Stage waterfall",
    (
        Panel(
            "Where a request's time goes",
            "s",
            tuple(Query(_mean_seconds(stage), stage) for stage in STAGES),
            "Mean over all finished requests, including requests that skipped the stage. Stages of a request may "
            "overlap, so the sum may exceed the whole time.",
            stacked=True,
        ),
        Panel(
            "Time in each stage, p95",
            "s",
            (Query(quantile(0.95, "request_stage_seconds", APPLICATION, "stage"), "{{stage}}"),),
            "Over requests that ran the stage: a cached picture skips the stages before its cache.",
        ),
    ),
    columns=2,
)

REQUESTS = Row(
    "Requests",
    (
        Panel("Requests answered", "reqps", (Query(_ENDED, "{{finished_reason}}"),), "abort: the client went away."),
        Panel(
            "Share as fast as promised",
            "percentunit",
            (Query(share(counted("requests_within_slo", of=APPLICATION), _ANSWERED), "within the objectives"),),
            "No value while no request is answered.",
        ),
        Panel(
            "Tokens",
            "cps",
            (
                Query(counted("generation_tokens", "model", of=APPLICATION), "{{model}} generated"),
                Query(counted("prompt_tokens", "model", of=APPLICATION), "{{model}} prompt"),
                Query(
                    counted("prompt_tokens_cached", "model", of=APPLICATION), "{{model}} prompt, from the prefix cache"
                ),
            ),
        ),
        Panel(
            "Time to first token by kind of request, p50",
            "s",
            (
                Query(
                    quantile(0.5, "time_to_first_token_seconds", APPLICATION, "model", "modality", "cached"),
                    "{{model}} {{modality}}, cached: {{cached}}",
                ),
            ),
            "cached: whether all media of the request were cached.",
        ),
        Panel("Whole request", "s", percentiles("e2e_request_latency_seconds", "model")),
        Panel(
            "Time per output token",
            "s",
            percentiles("request_time_per_output_token_seconds", "model"),
            "A request's mean gap between its tokens.",
        ),
        Panel(
            "In the language engine",
            "s",
            (
                Query(mean("request_queue_time_seconds", APPLICATION), "waiting"),
                Query(mean("request_prefill_time_seconds", APPLICATION), "prefill"),
                Query(mean("request_decode_time_seconds", APPLICATION), "decode"),
            ),
            "Means over finished requests.",
            stacked=True,
        ),
        Panel(
            "Length of requests",
            "short",
            tuple(
                Query(quantile(q, f"request_{kind}_tokens", APPLICATION), f"{kind} p{q * 100:.0f}")
                for kind in ("prompt", "generation")
                for q in (0.5, 0.95)
            ),
            "Tokens.",
        ),
        Panel(
            "API keys",
            "cps",
            (
                Query(counted("api_key_requests", "api_key", of=APPLICATION), "{{api_key}} requests"),
                Query(counted("api_key_prompt_tokens", "api_key", of=APPLICATION), "{{api_key}} prompt tokens"),
                Query(counted("api_key_generation_tokens", "api_key", of=APPLICATION), "{{api_key}} generated tokens"),
            ),
            "Empty if the server has no API keys.",
        ),
    ),
)
