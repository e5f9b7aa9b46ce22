"""Rows about the cluster: Ray's object store, replicas, errors. Names with `ray_` are Ray's own metrics."""

from dashboards.objectives import ERRORS as ERROR_OBJECTIVE
from dashboards.objectives import FIRST_TOKENS
from dashboards.panels import Bytes, Count, PerSecond, RequestsPerSecond, Row, Seconds, Share
from dashboards.promql import APPLICATION, DEPLOYMENT, NODE, REPLICA, counted, rate, series, total

_STARTED = series("replica_start_time_seconds", REPLICA)
_STARTS = series("replica_starts_total", DEPLOYMENT)
_VERSIONS = f"count by (version, ray_version) ({series('build_info', REPLICA)})"


def _of_nodes(metric: str, *conditions: str) -> str:
    return total(f"{metric}{{{','.join((NODE, *conditions))}}}", "NodeAddress")


def _of_serve(metric: str, aggregate: str = "sum") -> str:
    """Returns one of Ray Serve's gauges by deployment."""
    return f'{aggregate} by (deployment) (ray_serve_{metric}{{application=~"$application",deployment=~"$deployment"}})'


_SPILLED = f'ray_spill_manager_request_total{{{NODE},Type=~"Spilled|Restored"}}'
_USED, _AVAILABLE = (_of_nodes(f"ray_object_store_{part}_memory") for part in ("used", "available"))

OBJECT_STORE = Row(
    "Object store",
    Share("Object store in use", {"{{NodeAddress}}": f"{_USED} / ({_USED} + {_AVAILABLE})"}, limit=1.0),
    Bytes(
        "Spilled to disk",
        {
            "{{NodeAddress}} on disk": _of_nodes("ray_object_store_memory", 'Location="SPILLED"'),
            "{{NodeAddress}} allocated on disk": _of_nodes("ray_object_store_fallback_memory"),
        },
        "Reading an object from disk takes about a hundred times as long as from memory.",
    ),
    PerSecond(
        "Objects spilled and restored",
        {"{{NodeAddress}} {{Type}}": rate(_SPILLED, "NodeAddress", "Type")},
    ),
)

REPLICAS = Row(
    "Replicas",
    Count(
        "Running",
        {
            "{{deployment}}": f"count by (deployment) ({_STARTED})",
            "{{deployment}} wanted": _of_serve("autoscaling_target_replicas", "max"),
        },
    ),
    Count(
        "Started",
        {"{{deployment}}": total(f"increase({_STARTS}[$__rate_interval])", "deployment")},
        "Starts between two points.",
    ),
    Seconds("Age of the youngest", {"{{deployment}}": f"time() - max by (deployment) ({_STARTED})"}),
    Count(
        "Software",
        {"Raylens {{version}}, Ray {{ray_version}}": _VERSIONS},
        "Replicas that run each version.",
    ),
    Count("Nodes lost", {"nodes": f"max({series('lost_nodes', REPLICA)})"}, "Nodes that ended unplanned."),
    Count("Calls waiting for a replica", {"{{deployment}}": _of_serve("deployment_queued_queries")}),
    Count("Calls in work", {"{{deployment}}": _of_serve("replica_processing_queries")}),
)

ERRORS = Row(
    "Errors",
    RequestsPerSecond(
        "Errors",
        {
            "all": counted("request_errors", of=APPLICATION),
            "{{stage}} {{code}}": f"{counted('request_errors', 'stage', 'code', of=APPLICATION)} > 0",
        },
        "Only codes that occur. Stage `ingress`: client errors and refusals.",
    ),
    PerSecond(
        "Work done again",
        {"{{stage}} {{reason}}": counted("items_recomputed", "stage", "reason")},
        "After a replica died or data was lost.",
    ),
    Count(
        "Error budget burnt",
        {
            f"{one.name}, {window}": f'{one.ratio(window)}{{application=~"$application"}} / {one.allowed:g}'
            for one in (ERROR_OBJECTIVE, FIRST_TOKENS)
            for window in ("5m", "1h")
        },
        "At 1, a month's budget lasts exactly a month. Needs the recording rules.",
        limit=1.0,
    ),
)
