"""Prometheus' alerts. docs/alerts.md has a runbook entry for each: meaning, investigation, action."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from dashboards.objectives import DOCS_URL, ERRORS, FIRST_TOKENS, Objective
from dashboards.promql import PREFIX
from dashboards.recording import CACHE_EVICTIONS, CACHE_HITS, WAITING


@dataclass(frozen=True, slots=True)
class Alert:
    """`name`: also a heading of the runbook. `lasting`: the least duration of the condition, in Prometheus' format.
    `severity`: `page` needs immediate action, `ticket` waits for the next working day."""

    severity: str
    lasting: str
    name: str
    expression: str
    summary: str

    @property
    def runbook(self) -> str:
        return f"{DOCS_URL}/alerts.md#{self.name.lower()}"

    @property
    def rule(self) -> dict[str, Any]:
        """Returns the alert in Prometheus' format."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook_url": self.runbook},
        }


_FEWEST_REQUESTS = 20
"""The least requests in the long window: with fewer, one bad request would trigger the alert."""


def _burn_rates(objective: Objective, name: str, summary: str) -> Iterator[Alert]:
    """Yields the two burn-rate alerts of Google's SRE workbook, with two windows each: the long one shows that the
    problem matters, the short one that it continues. The factors correspond to 2 and 5 % of a month's budget in the
    long window."""
    for long, short, seconds, factor, severity in (("1h", "5m", 3600, 14.4, "page"), ("6h", "30m", 21600, 6, "ticket")):
        bad = f"{factor * objective.allowed:g}"
        expression = (
            f"{objective.ratio(long)} > {bad} and {objective.ratio(short)} > {bad}"
            f" and {objective.requests(long)} * {seconds} >= {_FEWEST_REQUESTS}"
        )
        yield Alert(severity, "2m", name, expression, f"{summary} in the last {long}")


_page, _ticket = partial(Alert, "page"), partial(Alert, "ticket")

_REPLICAS = f"{PREFIX}replica_start_time_seconds"
_LOST_NODES = f"max by (application) ({PREFIX}lost_nodes)"

ALERTS = (
    _page("1m", "RaylensServerDown", f"absent({_REPLICAS})", "Prometheus gets no metrics of any replica"),
    _page(
        "1m",
        "RaylensNoIngress",
        f'count by (application) ({_REPLICAS}) unless count by (application) ({_REPLICAS}{{deployment="Ingress"}})',
        "{{ $labels.application }} has no replica of the ingress",
    ),
    _page(
        "1m",
        "RaylensEndpointUnreachable",
        'probe_success{job="raylens-probe"} == 0 or up{job="raylens-api"} == 0',
        "{{ $labels.instance }} does not answer, or is not ready",
    ),
    _page(
        "0m",
        "RaylensNodeLost",
        f"{_LOST_NODES} - min_over_time({_LOST_NODES}[15m:]) > 0",
        'nodes lost in 15 minutes: {{ printf "%.0f" $value }}',
    ),
    *_burn_rates(ERRORS, "RaylensErrorsBurnBudget", "{{ $value | humanizePercentage }} of requests failed"),
    *_burn_rates(
        FIRST_TOKENS, "RaylensLateFirstTokensBurnBudget", "{{ $value | humanizePercentage }} of first tokens were late"
    ),
    _ticket(
        "5m",
        "RaylensQueueGrows",
        f"deriv({WAITING}[10m]) > 0 and min_over_time({WAITING}[5m]) > 0",
        "requests wait, and more and more of them",
    ),
    _ticket(
        "5m",
        "RaylensRefusesRequests",
        f"sum by (application, reason) (rate({PREFIX}admission_rejections_total[5m])) > 0",
        "requests are refused for want of room: {{ $labels.reason }}",
    ),
    _ticket(
        "15m",
        "RaylensCacheThrashes",
        f"{CACHE_EVICTIONS} > 0.5 and {CACHE_HITS} < 0.5",
        'the cache of {{ $labels.cache }} evicts {{ printf "%.2g" $value }} items for each that is looked up',
    ),
    _ticket(
        "5m",
        "RaylensKvCacheFull",
        # A median, because each preempted sequence frees blocks for a moment.
        f"quantile_over_time(0.5, {PREFIX}kv_cache_usage_perc[5m]) > 0.95",
        "the KV cache of {{ $labels.replica }} is full",
    ),
    _ticket(
        "1m",
        "RaylensObjectStoreSpills",
        'sum by (NodeAddress) (ray_object_store_memory{Location="SPILLED"}) > 0',
        "{{ $labels.NodeAddress }} has {{ $value | humanize1024 }}B of objects on disk",
    ),
    _page(
        "0m",
        "RaylensReplicasFlap",
        # After an update, each replica has started once. Without replicas the comparison has no right side.
        f"sum by (application, deployment) (increase({PREFIX}replica_starts_total[15m])) > 2.5 unless"
        f" sum by (application, deployment) (increase({PREFIX}replica_starts_total[15m]))"
        f" <= 1.5 * count by (application, deployment) ({_REPLICAS})",
        'replicas of {{ $labels.deployment }} started {{ printf "%.0f" $value }} times in 15 minutes',
    ),
    _page(
        "15s",
        "RaylensHeartbeatStale",
        f"max by (application, model, stage) ({PREFIX}stage_heartbeat_age_seconds) > 10",
        "{{ $labels.stage }} of {{ $labels.model }} has given no sign of life for {{ $value | humanizeDuration }}",
    ),
    _page(
        "1m",
        "RaylensStageNotReady",
        f"min by (application, model, stage) ({PREFIX}stage_ready) == 0",
        "{{ $labels.stage }} of {{ $labels.model }} is not ready",
    ),
    _ticket(
        "2m",
        "RaylensNodeNotScraped",
        # A node without replicas has no exporter. Ray's agent reports whether the event loop of a replica runs there.
        'label_replace(up{job="raylens"} == 0, "NodeAddress", "$1", "instance", "(.+):.+")'
        " and on (NodeAddress) rate("
        'ray_serve_event_loop_monitoring_iterations_total{component="replica"}[5m]) > 0'
        ' or up{job=~"ray|raylens-probe"} == 0',
        "{{ $labels.instance }} gives Prometheus no metrics",
    ),
)
