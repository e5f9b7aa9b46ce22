"""Rows about whole requests: objectives, time by stage, and kinds of requests."""

from dashboards.objectives import ERRORS, FAILED, FIRST_TOKEN_SECONDS
from dashboards.panels import Count, RequestsPerSecond, Row, Seconds, Share, TokensPerSecond
from dashboards.promql import APPLICATION, counted, mean, quantile, rate, series, share, share_or_zero
from raylens.deployments.metrics.waterfall_stages import WATERFALL as STAGES


def _counted(counter: str, *tags: str) -> str:
    return counted(counter, *tags, of=APPLICATION)


def _percentiles(histogram: str, *tags: str) -> dict[str, str]:
    legend = "".join(f"{{{{{tag}}}}} " for tag in tags)
    return {f"{legend}p{q * 100:.0f}": quantile(q, histogram, APPLICATION, *tags) for q in (0.5, 0.99)}


def _mean_seconds(stage: str) -> str:
    """Returns the mean over all finished requests, or 0 without any."""
    seconds = rate(series("request_stage_seconds_sum", APPLICATION, f'stage="{stage}"'))
    return share_or_zero(seconds, rate(series("e2e_request_latency_seconds_count", APPLICATION)))


_ANSWERED = _counted("request_success")
_IN_TIME = _counted("requests_within_slo")
# Codes without failures so far may have no series. The result is then 0 if requests are counted at all.
_FAILED = f"({rate(series('request_errors_total', APPLICATION, FAILED))} or 0 * {_ANSWERED})"

_TTFT_BY_KIND = quantile(0.5, "time_to_first_token_seconds", APPLICATION, "model", "modality", "cached")
_ENGINE_PARTS = {"waiting": "queue", "prefill": "prefill", "decode": "decode"}

OBJECTIVES = Row(
    "Objectives",
    Seconds(
        "Time to first token",
        _percentiles("time_to_first_token_seconds"),
        "From a request's arrival to its first token. The line is the objective.",
        limit=FIRST_TOKEN_SECONDS,
    ),
    Seconds("Inter-token latency", _percentiles("inter_token_latency_seconds"), "Each gap between two tokens."),
    Share(
        "Error ratio",
        {"failed": share_or_zero(_FAILED, f"({_ANSWERED} + {_FAILED})")},
        "The share of admitted, valid requests that failed by the server's fault. The line is the objective.",
        limit=ERRORS.allowed,
    ),
    RequestsPerSecond(
        "Goodput",
        {"as fast as promised": _IN_TIME, "all": _ANSWERED},
        "Requests answered within metrics.slo_time_to_first_token_s and metrics.slo_time_per_output_token_s.",
    ),
    columns=4,
)

WATERFALL = Row(
    "Stage waterfall",
    Seconds(
        "Where a request's time goes",
        {stage: _mean_seconds(stage) for stage in STAGES},
        "Mean over all finished requests, including requests that skipped the stage. Stages of a request may "
        "overlap, so the sum may exceed the whole time.",
        stacked=True,
    ),
    Seconds(
        "Time in each stage, p95",
        {"{{stage}}": quantile(0.95, "request_stage_seconds", APPLICATION, "stage")},
        "Over requests that ran the stage: a cached picture skips the stages before its cache.",
    ),
    columns=2,
)

REQUESTS = Row(
    "Requests",
    RequestsPerSecond(
        "Requests answered",
        {"{{finished_reason}}": _counted("request_success", "finished_reason")},
        "abort: the client went away.",
    ),
    Share(
        "Share as fast as promised",
        {"within the objectives": share(_IN_TIME, _ANSWERED)},
        "No value while no request is answered.",
    ),
    TokensPerSecond(
        "Tokens",
        {
            "{{model}} generated": _counted("generation_tokens", "model"),
            "{{model}} prompt": _counted("prompt_tokens", "model"),
            "{{model}} prompt, from the prefix cache": _counted("prompt_tokens_cached", "model"),
        },
    ),
    Seconds(
        "Time to first token by kind of request, p50",
        {"{{model}} {{modality}}, cached: {{cached}}": _TTFT_BY_KIND},
        "cached: whether all media of the request were cached.",
    ),
    Seconds("Whole request", _percentiles("e2e_request_latency_seconds", "model")),
    Seconds(
        "Time per output token",
        _percentiles("request_time_per_output_token_seconds", "model"),
        "A request's mean gap between its tokens.",
    ),
    Seconds(
        "In the language engine",
        {name: mean(f"request_{part}_time_seconds", APPLICATION) for name, part in _ENGINE_PARTS.items()},
        "Means over finished requests.",
        stacked=True,
    ),
    Count(
        "Length of requests",
        {
            f"{kind} p{q * 100:.0f}": quantile(q, f"request_{kind}_tokens", APPLICATION)
            for kind in ("prompt", "generation")
            for q in (0.5, 0.95)
        },
        "Tokens.",
    ),
    TokensPerSecond(
        "API keys",
        {
            "{{api_key}} requests": _counted("api_key_requests", "api_key"),
            "{{api_key}} prompt tokens": _counted("api_key_prompt_tokens", "api_key"),
            "{{api_key}} generated tokens": _counted("api_key_generation_tokens", "api_key"),
        },
        "Empty if the server has no API keys.",
    ),
)
