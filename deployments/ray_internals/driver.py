"""This process as Ray's driver: its folders, signals, metrics, threads, and the death of its cluster.

Ray 2.60: a driver sends its working folder and its script's folder (`_py_driver_sys_path` of its `JobConfig`) to its
workers, which import from there first. `ray.init` replaces the driver's handler of SIGTERM. Each session exports
metrics in a thread; OpenTelemetry in `_raylet.so` joins the first session's thread only, and later ones crash some runs
while the process ends. Neither `serve.shutdown()` nor `ray.shutdown()` ends the event loop that routes a driver's
calls. Public calls wait for a dead cluster without a limit, and none tells whether its processes run.
Needed: a folder `torch` where the server is started is not imported as PyTorch. A SIGTERM during Ray's start waits for
its end (`deployments/cluster/ray_session.py`). A process may have several sessions, leaves no threads of theirs, and
ends cleanly; Ray's other processes report its metrics. `raylens serve` ends with a message when Ray has died.
Test: `tests/deployments/ray_internals/test_driver.py`, `tests/deployments/ray_internals/test_environment.py`,
`tests/deployments/ray_internals/test_on_ray.py`, `test_the_vital_processes_of_this_driver_s_ray_run`;
`tests/deployments/test_ray_session.py`, `tests/deployments/test_server_endings.py`, `tests/test_package.py`.
Way back: options of `JobConfig` (ray-project/ray#43214, reverted by #44435) and of `ray.init` for signals (#17308,
#46997, closed) and metrics (#60048 reports such a crash); a `serve.shutdown()` that ends the thread; a public list of
the processes of `ray.init`."""

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WITHOUT_METRICS = {"RAY_enable_open_telemetry": "0", "RAY_enable_metrics_collection": "0"}
_VITAL = ("raylet", "gcs_server")  # Ray's names of the processes that a cluster cannot do without
_END_SECONDS = 10.0


def driver_job() -> Any:
    """Returns a JobConfig that sends the workers no folders. Imports Ray late: Ray reads its environment at import."""
    from ray.job_config import JobConfig

    class DriverJob(JobConfig):
        @property
        def _py_driver_sys_path(self) -> list[str]:
            return []

        @_py_driver_sys_path.setter
        def _py_driver_sys_path(self, folders: Any) -> None:
            """Keeps none."""

    return DriverJob()


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Keeps Ray from installing its handler while the block runs."""
    from ray._private import utils

    set_by_ray = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda sigterm_handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_by_ray


@contextmanager
def no_driver_metrics() -> Iterator[None]:
    """Makes a driver that starts in the block export no metrics. Ray's processes get the unchanged `os.environ`."""
    for name, value in WITHOUT_METRICS.items():
        os.putenv(name, value)
    try:
        yield
    finally:
        for name in WITHOUT_METRICS:
            if name in os.environ:
                os.putenv(name, os.environ[name])
            else:
                os.unsetenv(name)


def end_router_thread() -> None:
    """Ends the thread that routes the driver's calls, if any. Handles of a later session start another one."""
    router = sys.modules.get("ray.serve._private.router")
    loop: asyncio.AbstractEventLoop | None = None if router is None else router.SingletonThreadRouter._asyncio_loop
    if router is None or loop is None:
        return
    router.SingletonThreadRouter._asyncio_loop = None
    threads = [thread for thread in threading.enumerate() if "(_run_router_event_loop)" in thread.name]
    asyncio.run_coroutine_threadsafe(_stop_loop(), loop)
    for thread in threads:
        thread.join(_END_SECONDS)


async def _stop_loop() -> None:
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop.call_soon(loop.stop)


def ended_vital_process() -> tuple[str, int] | None:
    """Returns the name and the exit status of a vital process of this driver's own Ray that has ended, if any."""
    from ray._private.worker import _global_node

    for kind, process in [] if _global_node is None else _global_node.dead_processes():
        if kind in _VITAL:
            return kind, process.returncode
    return None
