"""What the replica of every deployment does first and last."""

from deployments.config import AppConfig
from deployments.metrics.definitions import ReplicaMetrics
from deployments.metrics.recording import record_metrics
from deployments.server_log import join_server_log, process_name
from deployments.tracing.export import spans_of
from deployments.tracing.spans import Spans


def start_replica(stage: str, config: AppConfig) -> Spans:
    """Joins the server's log under the name `stage`, and records the replica's metrics. Call it before any metric is
    made. Returns what makes the replica's spans."""
    join_server_log(stage)
    record_metrics(config.metrics)
    ReplicaMetrics().report_start()
    return spans_of(config.tracing, process_name())


class Replica:
    """The base class of deployments. Its replicas send the spans that wait before they end."""

    _spans = Spans()  # also in a replica that could not start

    def __del__(self) -> None:
        """Ray Serve calls this when it stops a healthy replica, after its last request, and kills the process then."""
        self._spans.flush()
