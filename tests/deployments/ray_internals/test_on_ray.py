"""What we use of Ray's private parts does what we take it to do, on a real Ray Serve."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig
from ray.serve.handle import DeploymentHandle

from raylens.deployments.cluster.ray_session import NoRayError
from raylens.deployments.launch.app_lifetime import end_app
from raylens.deployments.ray_internals.driver import _VITAL, ended_vital_process
from raylens.deployments.ray_internals.handles import by_grpc, has_running_replica, route_on_this_loop
from raylens.deployments.ray_internals.serve_client import begin_deletion, running_http_options
from raylens.deployments.session_folder import session_folder
from tests.replicas import children

TIMEOUT = 30.0


class Worker:
    async def pid(self) -> int:
        return os.getpid()


class Caller:
    """Calls a worker on its own event loop, as the ingress does."""

    def __init__(self, worker: DeploymentHandle[Any], resting: DeploymentHandle[Any]) -> None:
        self._worker, self._resting = worker, resting
        route_on_this_loop(worker, resting)

    async def replicas_run(self) -> tuple[bool, bool]:
        await self._worker.pid.remote()
        return has_running_replica(self._worker), has_running_replica(self._resting)

    async def pids(self) -> tuple[int, int]:
        """By reference and by gRPC."""
        grpc = by_grpc(self._worker)
        calls = self._worker.pid.remote(), grpc.pid.remote()
        assert [call.by_reference for call in calls] == [True, False]
        assert grpc._router is self._worker._router
        one, other = await asyncio.gather(*calls)
        return one, other

    async def threads(self) -> list[str]:
        await self._worker.pid.remote()
        return [thread.name for thread in threading.enumerate()]

    def session_folder(self) -> str:
        return str(session_folder())


@pytest.fixture(scope="module")
def caller(ray_port: int) -> Iterator[DeploymentHandle[Any]]:
    options = {"ray_actor_options": {"num_cpus": 0.1}, "graceful_shutdown_timeout_s": 1.0}
    resting = AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=1)
    bound = (
        serve.deployment(Worker, **options).bind(),
        serve.deployment(Worker, name="Resting", autoscaling_config=resting, **options).bind(),
    )
    yield serve.run(serve.deployment(Caller, **options).bind(*bound), name="internals", route_prefix=None)
    end_app("internals")


def asked(caller: DeploymentHandle[Any], method: str) -> Any:
    return getattr(caller, method).remote().result(timeout_s=TIMEOUT)


def test_a_handle_knows_whether_a_replica_runs(caller: DeploymentHandle[Any]) -> None:
    assert asked(caller, "replicas_run") == (True, False)


def test_calls_by_grpc_and_by_reference_go_through_one_router(caller: DeploymentHandle[Any]) -> None:
    one, other = asked(caller, "pids")
    assert one == other


def test_calls_are_routed_on_the_caller_s_loop(caller: DeploymentHandle[Any]) -> None:
    assert not [name for name in asked(caller, "threads") if "_run_router_event_loop" in name]


def test_replicas_and_the_driver_have_one_session_folder(caller: DeploymentHandle[Any]) -> None:
    assert asked(caller, "session_folder") == str(session_folder())
    assert (session_folder() / "logs").is_dir()


def test_the_client_tells_options_and_deletes_without_waiting(ray_port: int) -> None:
    assert running_http_options().port == ray_port
    options = {"ray_actor_options": {"num_cpus": 0.1}, "graceful_shutdown_wait_loop_s": 0.5}
    serve.run(serve.deployment(Worker, **options).bind(), name="deleted", route_prefix=None)
    begin_deletion("deleted")
    assert "deleted" in serve.status().applications
    end_app("deleted")


class EndingController:
    def delete_apps(self, names: list[str]) -> None:
        raise OSError("the GCS server has ended")


def test_a_deletion_that_fails_is_an_error_of_its_caller(ray_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes may get the signal to end before their driver deletes the application. An error that nobody asks
    for, Ray writes to standard error."""
    client = SimpleNamespace(_controller=ray.remote(num_cpus=0)(EndingController).remote())
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda: client)
    with pytest.raises(NoRayError, match="cannot delete gone"):
        end_app("gone")


def test_the_vital_processes_of_this_driver_s_ray_run(ray_port: int) -> None:
    assert ended_vital_process() is None
    assert {*_VITAL} <= {str(kind) for kind in ray._private.worker._global_node.all_processes}


def test_one_machine_runs_no_process_that_it_does_not_need(ray_port: int) -> None:
    own = [pid for pid in children(os.getpid()) if "/ray/" in command_of(pid)]
    names = {Path(word).name for pid in own for word in command_of(pid).split("\0")[:3]}
    assert {"raylet", "gcs_server"} <= names
    assert not {"monitor.py", "log_monitor.py", "dashboard.py"} & names
    assert all(os.getpgid(pid) == pid for pid in own)


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
