"""What the replica of every deployment does first."""

from deployments.config import AppConfig
from deployments.server_log import join_server_log, process_name
from deployments.tracing import Spans, spans_of


def start_replica(stage: str, config: AppConfig) -> Spans:
    """Joins the server's log under the name `stage`. Returns what makes the replica's spans."""
    join_server_log(stage)
    return spans_of(config.tracing, process_name())
