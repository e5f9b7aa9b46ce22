"""What every replica does first."""

from deployments.config import MetricsConfig
from deployments.metrics.definitions import ReplicaMetrics
from deployments.metrics.recording import record_metrics
from deployments.server_log import join_server_log


def start_replica(process: str, metrics: MetricsConfig) -> None:
    """Joins the server's log under the name `process`, and records the replica's metrics. Call it before any metric is
    made."""
    join_server_log(process)
    record_metrics(metrics)
    ReplicaMetrics().report_start()
