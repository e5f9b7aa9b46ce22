"""Rows about the cluster: Ray's object store, replicas, errors. Names with `ray_` are Ray's own metrics."""

from dashboards.objectives import ERRORS as ERROR_OBJECTIVE
from dashboards.objectives import FIRST_TOKENS
from dashboards.panels import Panel, Query, Row
from dashboards.promql import APPLICATION, DEPLOYMENT, NODE, REPLICA, counted, series, total

_OF_DEPLOYMENT = 'application=~"$application",deployment=~"$deployment"'

OBJECT_STORE = Row(
    "Object store",
    (
        Panel(
            "Object store in use",
            "percentunit",
            (
                Query(
                    f"sum by (NodeAddress) (ray_object_store_used_memory{{{NODE}}})"
                    f" / (sum by (NodeAddress) (ray_object_store_used_memory{{{NODE}}})"
                    f" + sum by (NodeAddress) (ray_object_store_available_memory{{{NODE}}}))",
                    "{{NodeAddress}}",
                ),
            ),
            limit=1.0,
        ),
        Panel(
            "Spilled to disk",
            "bytes",
            (
                Query(
                    f'sum by (NodeAddress) (ray_object_store_memory{{{NODE},Location="SPILLED"}})',
                    "{{NodeAddress}} on disk",
                ),
                Query(
                    f"sum by (NodeAddress) (ray_object_store_fallback_memory{{{NODE}}})",
                    "{{NodeAddress}} allocated on disk",
                ),
            ),
            "Reading an object from disk takes about a hundred times as long as from memory.",
        ),
        Panel(
            "Objects spilled and restored",
            "ops",
            (
                Query(
                    f"sum by (NodeAddress, Type) (rate(ray_spill_manager_request_total{{{NODE},"
                    'Type=~"Spilled|Restored"}[$__rate_interval]))',
                    "{{NodeAddress}} {{Type}}",
                ),
            ),
        ),
    ),
)

REPLICAS = Row(
    "Replicas",
    (
        Panel(
            "Running",
            "short",
            (
                Query(f"count by (deployment) ({series('replica_start_time_seconds', REPLICA)})", "{{deployment}}"),
                Query(
                    f"max by (deployment) (ray_serve_autoscaling_target_replicas{{{_OF_DEPLOYMENT}}})",
                    "{{deployment}} wanted",
                ),
            ),
        ),
        Panel(
            "Started",
            "short",
            (
                Query(
                    total(f"increase({series('replica_starts_total', DEPLOYMENT)}[$__rate_interval])", "deployment"),
                    "{{deployment}}",
                ),
            ),
            "Starts between two points.",
        ),
        Panel(
            "Age of the youngest",
            "s",
            (
                Query(
                    f"time() - max by (deployment) ({series('replica_start_time_seconds', REPLICA)})", "{{deployment}}"
                ),
            ),
        ),
        Panel(
            "Software",
            "short",
            (
                Query(
                    f"count by (version, ray_version) ({series('build_info', REPLICA)})",
                    "Raylens {{version}}, Ray {{ray_version}}",
                ),
            ),
            "Replicas that run each version.",
        ),
        Panel(
            "Calls waiting for a replica",
            "short",
            (
                Query(
                    f"sum by (deployment) (ray_serve_deployment_queued_queries{{{_OF_DEPLOYMENT}}})", "{{deployment}}"
                ),
            ),
        ),
        Panel(
            "Calls in work",
            "short",
            (
                Query(
                    f"sum by (deployment) (ray_serve_replica_processing_queries{{{_OF_DEPLOYMENT}}})", "{{deployment}}"
                ),
            ),
        ),
    ),
)

ERRORS = Row(
    "Errors",
    (
        Panel(
            "Errors",
            "reqps",
            (
                Query(counted("request_errors", of=APPLICATION), "all"),
                Query(f"{counted('request_errors', 'stage', 'code', of=APPLICATION)} > 0", "{{stage}} {{code}}"),
            ),
            "Only codes that occur. Stage `ingress`: client errors and refusals.",
        ),
        Panel(
            "Work done again",
            "ops",
            (Query(counted("items_recomputed", "stage", "reason"), "{{stage}} {{reason}}"),),
            "After a replica died or data was lost.",
        ),
        Panel(
            "Error budget burnt",
            "short",
            tuple(
                Query(
                    f'{objective.ratio(window)}{{application=~"$application"}} / {objective.allowed:g}',
                    f"{objective.name}, {window}",
                )
                for objective in (ERROR_OBJECTIVE, FIRST_TOKENS)
                for window in ("5m", "1h")
            ),
            "At 1, a month's budget lasts exactly a month. Needs the recording rules.",
            limit=1.0,
        ),
    ),
)
