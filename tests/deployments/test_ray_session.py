"""A process that had Ray sessions ends as cleanly as any other: what they leave behind, by the threads of a process of
its own."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import utils

from raylens.deployments.cluster.ray_session import joined_cluster, ray_session
from tests.signal_handlers import handled

ROOT = Path(__file__).parent.parent.parent

SESSIONS = """
import gc, json, sys, threading
from pathlib import Path
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import local_ray
from raylens.deployments.cluster.ray_session import ray_session

class Echo:
    def __call__(self, word):
        return word

with local_ray(host="127.0.0.1", port=free_port(), num_cpus=1):
    pass
with ray_session(num_cpus=1):  # the second, whose threads Ray itself would leave
    from ray import serve
    echo = serve.deployment(Echo, ray_actor_options={"num_cpus": 0.1}).bind()
    handle = serve.run(echo, name="echo", route_prefix=None)
    print(handle.remote("called").result(timeout_s=60), file=sys.stderr)
    assert any("_run_router_event_loop" in thread.name for thread in threading.enumerate())
    del handle
    serve.shutdown()
gc.collect()
own = Path("/proc/self/comm").read_text()
tasks = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print(json.dumps({
    "python": [thread.name for thread in threading.enumerate()],
    "like this process": tasks.count(own),
    "others": sorted({name.strip() for name in tasks if name != own}),
}))
"""

WHO_MAY_STAY = {
    "_poll_wrapper": "gRPC's for Python, which handles call through; it waits for calls that do not come any more",
    "lifeguard": "gRPC's for Python, likewise",
    "gcs_client_io_s": "Ray's client of its control service, one for all sessions; joined when the process ends",
    "worker.io": "Ray's pool for answers to calls, one for all sessions; joined when the process ends",
    "default-executo": "gRPC's, one for all sessions; nothing that it uses is destroyed when the process ends",
    "resolver-execut": "gRPC's, likewise",
    "event_engine": "gRPC's, likewise",
    "timer_manager": "gRPC's, likewise",
    "grpc_global_tim": "gRPC's, likewise",
}


@pytest.fixture(scope="module")
def left_over() -> dict[str, Any]:
    """The threads of a process after two sessions, in the second of which it called a deployment through a handle.
    That it ends with 0 is checked, too."""
    sessions = [sys.executable, "-c", SESSIONS]
    result = subprocess.run(sessions, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert "called" in result.stderr
    threads: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return threads


@pytest.mark.slow
def test_no_thread_of_python_is_left(left_over: dict[str, Any]) -> None:
    others = set(left_over["python"]) - {"MainThread"}
    assert {re.sub(r".*\((.*)\)", r"\1", name) for name in others} <= WHO_MAY_STAY.keys()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_a_session_is_left_that_measures(left_over: dict[str, Any]) -> None:
    """Those have no name of their own, but that of the process, as Python's threads have. There is one more: of
    OpenCensus, one for all sessions. It looks for measurements ten times a second, in memory that is never freed."""
    assert left_over["like this process"] <= len(left_over["python"]) + 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_native_threads_that_are_left_are_known_to_be_harmless(left_over: dict[str, Any]) -> None:
    assert set(left_over["others"]) <= WHO_MAY_STAY.keys()


SLOW_AGENTS = """
import sys, time
if any(argument.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for argument in sys.orig_argv):
    time.sleep(18)
"""


def test_ray_starts_though_its_agents_are_slow(tmp_path: Path) -> None:
    """As on a busy machine. Ray waits 15 s for ports that they choose themselves."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    code = """
import ray
from raylens.deployments.cluster.ray_session import ray_session
with ray_session(num_cpus=1):
    print(ray.get(ray.remote(lambda: "called").remote(), timeout=60))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout == "called\n", result.stderr


def test_sessions_are_started_nowhere_else() -> None:
    sources = (path for folder in ("deployments", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
    starting = [path for path in sources if re.search(r"\bray\.init\(", path.read_text())]
    assert starting == [ROOT / "deployments" / "cluster" / "ray_session.py"]


def test_a_ray_that_does_not_start_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise Exception("the current node timed out")

    monkeypatch.setattr(ray, "init", never)
    with pytest.raises(RuntimeError, match=r"^Ray did not start: the current node timed out$"), ray_session(1):
        pass


def test_no_ray_to_join_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", none)
    with pytest.raises(RuntimeError, match=r"^no Ray runs on this node: `raylens node` starts it$"), joined_cluster():
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_wait_until_ray_has_started(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[str] = []

    def start(*_: object, **__: object) -> None:
        utils.set_sigterm_handler(lambda *_: came.append("Ray's own"))
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert came == []

    monkeypatch.setattr(ray, "init", start)
    with handled(number, lambda number, frame: came.append(signal.Signals(number).name)), ray_session(1):
        assert came == [number.name]
