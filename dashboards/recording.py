"""Prometheus' recording rules, for the frequent and long queries of alerts. All are by application."""

from dashboards.objectives import ERRORS, FAILED, FIRST_TOKEN_SECONDS, FIRST_TOKENS, WINDOWS
from dashboards.promql import PREFIX

Rule = dict[str, str | dict[str, str]]
"""`record`: the name of the recorded series, in Prometheus' format level:metric:operations. `expr`: its expression."""


def recording_rules() -> list[Rule]:
    """Returns the rules in an order in which each rule follows the rules that it uses."""
    return [rule for window in WINDOWS for rule in _of_window(window)] + _of_caches() + [_WAITING]


def _sum(series: str, window: str) -> str:
    return f"sum by (application) (rate({PREFIX}{series}[{window}]))"


def _of_window(window: str) -> list[Rule]:
    answered = _sum("request_success_total", window)
    # Codes without failures so far may have no series.
    failed = f"({_sum(f'request_errors_total{{{FAILED}}}', window)} or 0 * {answered})"
    first_tokens = _sum("time_to_first_token_seconds_count", window)
    in_time = _sum(f'time_to_first_token_seconds_bucket{{le="{FIRST_TOKEN_SECONDS}"}}', window)
    expressions = {
        ERRORS.requests(window): f"{answered} + {failed}",
        ERRORS.ratio(window): f"{failed} / ({ERRORS.requests(window)} > 0)",
        FIRST_TOKENS.requests(window): first_tokens,
        FIRST_TOKENS.ratio(window): f"1 - {in_time} / ({FIRST_TOKENS.requests(window)} > 0)",
    }
    return [{"record": name, "expr": expression} for name, expression in expressions.items()]


CACHES = {"mm_cache": "processed items", "encoder_cache": "embeddings"}
CACHE_WINDOW = "10m"
CACHE_HITS = f"application:raylens_cache_hits:ratio_rate{CACHE_WINDOW}"
CACHE_EVICTIONS = f"application:raylens_cache_evictions:per_query_rate{CACHE_WINDOW}"


def _of_caches() -> list[Rule]:
    """Returns for each cache its hit rate and its evictions per lookup."""
    rules: list[Rule] = []
    for cache, kind in CACHES.items():
        queries = f"({_sum(f'{cache}_queries_total', CACHE_WINDOW)} > 0)"
        for name, counter in ((CACHE_HITS, "hits"), (CACHE_EVICTIONS, "evictions")):
            expression = f"{_sum(f'{cache}_{counter}_total', CACHE_WINDOW)} / {queries}"
            rules.append({"record": name, "expr": expression, "labels": {"cache": kind}})
    return rules


WAITING = "application:raylens_waiting_requests:sum"
_QUEUES = ("admission_waiting_requests", "num_requests_waiting")
_WAITING: Rule = {
    "record": WAITING,
    "expr": " + ".join(f"sum by (application) ({PREFIX}{queue})" for queue in _QUEUES),
}
