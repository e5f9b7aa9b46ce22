"""The first and last steps of every replica."""

from raylens.deployments.config import AppConfig
from raylens.deployments.loop_watchdog import end_when_stuck
from raylens.deployments.metrics.definitions import ReplicaMetrics
from raylens.deployments.metrics.recording import record_metrics
from raylens.deployments.server_log import join_server_log, process_name, stacks_descriptor
from raylens.deployments.tracing.export import spans_of
from raylens.deployments.tracing.spans import Spans


def start_replica(stage: str, config: AppConfig) -> Spans:
    """Joins the server's log under the name `stage`, watches the replica's event loop, and records its metrics. Returns
    the replica's Spans. Call it on the event loop, before creating any metric."""
    join_server_log(stage)
    end_when_stuck(stacks_descriptor())
    record_metrics(config.metrics)
    ReplicaMetrics().report_start()
    return spans_of(config.tracing, process_name())


class Replica:
    """The base class of deployments. At its end, a replica sends its pending spans."""

    _spans = Spans()  # also in a replica that failed to start

    def __del__(self) -> None:
        """Ray Serve calls this when it stops a healthy replica, after its last request, and then kills the process."""
        self._spans.flush()
