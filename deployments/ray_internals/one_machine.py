"""The processes of a Ray cluster on one machine, for one driver.

Ray 2.60: `ray.init` also starts the autoscaler, the log monitor and the dashboard's API server. The dashboard's agent
has a fixed port, and waits three seconds if another Ray of this machine has it. The agents choose their other ports.
The raylet waits 15 s for these and for the file with the fixed one, then it ends. All processes belong to the driver's
process group. A setup program that imports all of Ray starts every worker.
Needed: a server that is ready within seconds and idles cheaply, with `start_worker.py` as the setup program; on a busy
machine the agents' imports take longer than 15 s. A signal to the group of `raylens serve` (from a shell or a terminal)
does not reach Ray, which must outlive the application.
Test: `tests/deployments/ray_internals/test_driver.py`, `test_ray_init_starts_its_node_by_the_names_that_are_replaced`;
`tests/deployments/ray_internals/test_on_ray.py`, `test_one_machine_runs_no_process_that_it_does_not_need`;
`tests/deployments/test_ray_session.py`, `test_ray_starts_though_its_agents_are_slow`.
Way back: arguments of `ray.init` for the processes, the agents' ports, the setup program and the process group.
ray-project/ray#6008 once started the processes in sessions of their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ray import _raylet
from ray._private import node, services
from ray._private.parameter import RayParams

from raylens.deployments.ray_internals import start_worker

_AGENTS_PORTS = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
NUM_AGENTS_PORTS = len(_AGENTS_PORTS)


class OneMachineNode(node.Node):
    """The only node of a cluster."""

    def __init__(self, ray_params: RayParams, *, agents_ports: Sequence[int], **options: Any) -> None:
        ray_params.update(no_monitor=True, include_log_monitor=False, setup_worker_path=start_worker.__file__)
        ray_params.update(**dict(zip(_AGENTS_PORTS, agents_ports, strict=True)))
        super().__init__(ray_params, **options)

    def start_raylet(self, *args: Any, **options: Any) -> None:
        port = self._ray_params.dashboard_agent_listen_port
        raylet: Any = _raylet  # its stubs do not have all
        raylet.persist_port(self.get_session_dir_path(), self._node_id, raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        super().start_raylet(*args, **options)

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        if include_dashboard:
            super().start_api_server(include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)


class OwnGroupPopen(services.ConsolePopen):
    """Starts a process of Ray in a process group of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, process_group=0, **options)


@contextmanager
def one_machine(temp_dir: Path | None, agents_ports: Sequence[int]) -> Iterator[dict[str, str]]:
    """Makes `ray.init` start a `OneMachineNode` with `OwnGroupPopen` while the block runs. Yields further arguments for
    `ray.init`. `temp_dir`: parent of the session's folder, by default Ray's own. `agents_ports`: `NUM_AGENTS_PORTS`."""
    every_node, popen = node.Node, services.ConsolePopen
    node.Node = partial(OneMachineNode, agents_ports=agents_ports)
    services.ConsolePopen = OwnGroupPopen
    try:
        yield {} if temp_dir is None else {"_temp_dir": str(temp_dir)}
    finally:
        node.Node, services.ConsolePopen = every_node, popen
