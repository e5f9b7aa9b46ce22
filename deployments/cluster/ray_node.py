"""The processes of a Ray cluster that is one machine, for the time of one driver."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import node, services
from ray._private.parameter import RayParams

from raylens.deployments.cluster import start_worker


class OneMachineNode(node.Node):
    """The only node of a cluster. It does without processes that have nothing to do there: the autoscaler, the monitor
    that sends logs to the driver, and the dashboard, unless it is asked for."""

    def __init__(self, ray_params: RayParams, **options: Any) -> None:
        # The agent of Ray's dashboard takes a free port. For the fixed one it would wait three seconds where another
        # Ray of this machine has it.
        ray_params.update(no_monitor=True, include_log_monitor=False, dashboard_agent_listen_port=0)
        ray_params.update(setup_worker_path=start_worker.__file__)
        super().__init__(ray_params, **options)

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        if include_dashboard:
            super().start_api_server(include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)


class OwnGroupPopen(services.ConsolePopen):
    """Starts a process of Ray in a process group of its own. Signals that a shell, `timeout` or a terminal sends to the
    group of `raylens serve` do not reach it, so Ray still runs when the application is ended."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, process_group=0, **options)


@contextmanager
def one_machine() -> Iterator[None]:
    """Makes `ray.init` start a `OneMachineNode` while the block runs, each of its processes by `OwnGroupPopen`."""
    every_node, popen = node.Node, services.ConsolePopen
    node.Node, services.ConsolePopen = OneMachineNode, OwnGroupPopen
    try:
        yield
    finally:
        node.Node, services.ConsolePopen = every_node, popen
