"""The first and last steps of every replica, its regular reports, and the watch over its event loop."""

import asyncio
import faulthandler
from collections.abc import Callable

from raylens.deployments.config import AppConfig
from raylens.deployments.metrics.definitions import ReplicaMetrics
from raylens.deployments.metrics.recording import record_metrics
from raylens.deployments.server_log import join_server_log, process_name, stacks_descriptor
from raylens.deployments.tracing.export import spans_of
from raylens.deployments.tracing.spans import Spans

_REPORT_SECONDS = 0.5
_STUCK_SECONDS = 10.0
"""Ray Serve's own timeout of a health check. The longest steps of a healthy event loop take a second."""
_BEATS_PER_LIMIT = 10


def start_replica(stage: str, config: AppConfig) -> Spans:
    """Joins the server's log as `stage`, watches the event loop, records metrics. Call it before creating a metric."""
    join_server_log(stage)
    end_when_stuck(stacks_descriptor())
    record_metrics(config.metrics)
    ReplicaMetrics().report_start()
    return spans_of(config.tracing, process_name())


def end_when_stuck(log_descriptor: int, limit_s: float = _STUCK_SECONDS) -> None:
    """Ends this process with status 1 once the running event loop has not turned for `limit_s`, after writing all
    threads' stacks to `log_descriptor`. Ray Serve replaces the replica; its own health check stops a replica by a call
    that needs the event loop.

    The watch starts with the loop's next turn, so a constructor may take any time. faulthandler watches from a native
    thread, so code that holds the interpreter lock cannot block it."""
    loop = asyncio.get_running_loop()

    def beat() -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=log_descriptor)
        loop.call_later(limit_s / _BEATS_PER_LIMIT, beat)

    loop.call_soon(beat)


class Replica:
    """The base class of deployments. At its end, a replica sends its pending spans."""

    _spans = Spans()  # also in a replica that failed to start

    def _report_regularly(self, report: Callable[[], None]) -> None:
        """Calls `report` every half second from now on. Call it on the event loop."""

        async def repeat() -> None:
            while True:
                report()
                await asyncio.sleep(_REPORT_SECONDS)

        self._reporter = asyncio.get_running_loop().create_task(repeat())

    def __del__(self) -> None:
        """Ray Serve calls this when it stops a healthy replica, after its last request, and then kills the process."""
        self._spans.flush()
