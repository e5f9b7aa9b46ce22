"""Rows about whole requests: objectives, time by stage, and kinds of requests."""

from dashboards.objectives import ERRORS, FAILED, FIRST_TOKEN_SECONDS
from dashboards.panels import Panel, Row
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

_ENGINE_PARTS = {"waiting": "queue", "prefill": "prefill", "decode": "decode"}

OBJECTIVES = Row(
    "Objectives",
    Panel(
        "Time to first token",
        "s",
        _percentiles("time_to_first_token_seconds"),
        "From a request's arrival to its first token. The line is the objective.",
        limit=FIRST_TOKEN_SECONDS,
    ),
    Panel("Inter-token latency", "s", _percentiles("inter_token_latency_seconds"), "Each gap between two tokens."),
    Panel(
        "Error ratio",
        "percentunit",
        {"failed": share_or_zero(_FAILED, f"({_ANSWERED} + {_FAILED})")},
        "The share of admitted, valid requests that failed by the server's fault. The line is the objective.",
        limit=ERRORS.allowed,
    ),
    Panel(
        "Goodput",
        "reqps",
        {"as fast as promised": _IN_TIME, "all": _ANSWERED},
        "Requests answered within metrics.slo_time_to_first_token_s and metrics.slo_time_per_output_token_s.",
    ),
    columns=4,
)

WATERFALL = Row(
    "Stage waterfall",
    Panel(
        "Where a request's time goes",
        "s",
        {stage: _mean_seconds(stage) for stage in STAGES},
        "Mean over all finished requests, including requests that skipped the stage. Stages of a request may "
        "overlap, so the sum may exceed the whole time.",
        stacked=True,
    ),
    Panel(
        "Time in each stage, p95",
        "s",
        {"{{stage}}": quantile(0.95, "request_stage_seconds", APPLICATION, "stage")},
        "Over requests that ran the stage: a cached picture skips the stages before its cache.",
    ),
    columns=2,
)

REQUESTS = Row(
    "Requests",
    Panel(
        "Requests answered",
        "reqps",
        {"{{finished_reason}}": _counted("request_success", "finished_reason")},
        "abort: the client went away.",
    ),
    Panel(
        "Share as fast as promised",
        "percentunit",
        {"within the objectives": share(_IN_TIME, _ANSWERED)},
        "No value while no request is answered.",
    ),
    Panel(
        "Tokens",
        "cps",
        {
            "{{model}} generated": _counted("generation_tokens", "model"),
            "{{model}} prompt": _counted("prompt_tokens", "model"),
            "{{model}} prompt, from the prefix cache": _counted("prompt_tokens_cached", "model"),
        },
    ),
    Panel(
        "Time to first token by kind of request, p50",
        "s",
        {
            "{{model}} {{modality}}, cached: {{cached}}": quantile(
                0.5, "time_to_first_token_seconds", APPLICATION, "model", "modality", "cached"
            )
        },
        "cached: whether all media of the request were cached.",
    ),
    Panel("Whole request", "s", _percentiles("e2e_request_latency_seconds", "model")),
    Panel(
        "Time per output token",
        "s",
        _percentiles("request_time_per_output_token_seconds", "model"),
        "A request's mean gap between its tokens.",
    ),
    Panel(
        "In the language engine",
        "s",
        {name: mean(f"request_{part}_time_seconds", APPLICATION) for name, part in _ENGINE_PARTS.items()},
        "Means over finished requests.",
        stacked=True,
    ),
    Panel(
        "Length of requests",
        "short",
        {
            f"{kind} p{q * 100:.0f}": quantile(q, f"request_{kind}_tokens", APPLICATION)
            for kind in ("prompt", "generation")
            for q in (0.5, 0.95)
        },
        "Tokens.",
    ),
    Panel(
        "API keys",
        "cps",
        {
            "{{api_key}} requests": _counted("api_key_requests", "api_key"),
            "{{api_key}} prompt tokens": _counted("api_key_prompt_tokens", "api_key"),
            "{{api_key}} generated tokens": _counted("api_key_generation_tokens", "api_key"),
        },
        "Empty if the server has no API keys.",
    ),
)
