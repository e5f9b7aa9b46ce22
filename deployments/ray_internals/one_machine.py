"""The processes of a Ray cluster on one machine, for one driver.

Ray 2.60: `ray.init` also starts the autoscaler, the log monitor and the dashboard's API server. The dashboard's agent
has a fixed port, and waits three seconds if another Ray of this machine has it. All processes belong to the driver's
process group. A setup program that imports all of Ray starts every worker.
Needed: a server that is ready within seconds and idles cheaply, with `start_worker.py` as the setup program. A signal
to the group of `raylens serve` (from a shell or a terminal) does not reach Ray, which must outlive the application.
Test: `tests/deployments/ray_internals/test_driver.py`, `test_ray_init_starts_its_node_by_the_names_that_are_replaced`;
`tests/deployments/ray_internals/test_on_ray.py`, `test_one_machine_runs_no_process_that_it_does_not_need`.
Way back: arguments of `ray.init` for the processes, the agent's port, the setup program and the process group.
ray-project/ray#6008 once started the processes in sessions of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import node, services
from ray._private.parameter import RayParams

from raylens.deployments.ray_internals import start_worker


class OneMachineNode(node.Node):
    """The only node of a cluster."""

    def __init__(self, ray_params: RayParams, **options: Any) -> None:
        ray_params.update(no_monitor=True, include_log_monitor=False, dashboard_agent_listen_port=0)
        ray_params.update(setup_worker_path=start_worker.__file__)
        super().__init__(ray_params, **options)

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        if include_dashboard:
            super().start_api_server(include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)


class OwnGroupPopen(services.ConsolePopen):
    """Starts a process of Ray in a process group of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, process_group=0, **options)


@contextmanager
def one_machine(temp_dir: Path | None) -> Iterator[dict[str, str]]:
    """Makes `ray.init` start a `OneMachineNode` with `OwnGroupPopen` while the block runs. Yields further arguments for
    `ray.init`. `temp_dir`: parent of the session's folder, by default Ray's own."""
    every_node, popen = node.Node, services.ConsolePopen
    node.Node, services.ConsolePopen = OneMachineNode, OwnGroupPopen
    try:
        yield {} if temp_dir is None else {"_temp_dir": str(temp_dir)}
    finally:
        node.Node, services.ConsolePopen = every_node, popen
