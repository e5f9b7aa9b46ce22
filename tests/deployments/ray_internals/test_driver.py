"""Ray starts its driver by the private names that are replaced. These tests start no Ray, as
tests/deployments/test_ray_session.py does."""

import inspect
import signal
from functools import partial

from ray._private import node, services, utils, worker
from ray.job_config import JobConfig
from ray.serve._private.router import SingletonThreadRouter

from raylens.deployments.ray_internals.driver import driver_job, own_sigterm_handler
from raylens.deployments.ray_internals.one_machine import OneMachineNode, OwnGroupPopen, one_machine
from tests.signal_handlers import handled


def test_ray_sets_its_handler_by_the_function_that_is_replaced() -> None:
    with handled(signal.SIGTERM, signal.SIG_IGN):
        with own_sigterm_handler():
            utils.set_sigterm_handler(lambda *_: None)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert "ray._private.utils.set_sigterm_handler(sigterm_handler)" in inspect.getsource(worker.init)
    assert inspect.signature(utils.set_sigterm_handler).parameters.keys() == {"sigterm_handler"}


def test_serve_keeps_the_router_s_loop_where_it_is_looked_for() -> None:
    assert SingletonThreadRouter.__dict__["_asyncio_loop"] is None
    assert "def _run_router_event_loop():" in inspect.getsource(SingletonThreadRouter)


def test_a_driver_s_folders_do_not_reach_its_workers() -> None:
    for job, sent in ((JobConfig(), ["/here"]), (driver_job(), [])):
        job._py_driver_sys_path.extend(["/here"])  # as Ray does
        assert list(job._get_proto_job_config().py_driver_sys_path) == sent
    assert "job_config._py_driver_sys_path.extend(" in inspect.getsource(worker.connect)


def test_ray_init_starts_its_node_by_the_names_that_are_replaced() -> None:
    assert "ray._private.node.Node(" in inspect.getsource(worker.init)
    assert "process = ConsolePopen(" in inspect.getsource(services.start_ray_process)
    assert inspect.signature(node.Node.start_api_server).parameters.keys() == {
        *("self", "include_dashboard", "raise_on_failure")
    }
    assert "self.start_raylet(" in inspect.getsource(node.Node.start_ray_processes)
    before = node.Node, services.ConsolePopen
    with one_machine(None, [1, 2, 3, 4]) as options:
        assert options == {}
        assert isinstance(node.Node, partial)
        assert (node.Node.func, services.ConsolePopen) == (OneMachineNode, OwnGroupPopen)
    assert (node.Node, services.ConsolePopen) == before
