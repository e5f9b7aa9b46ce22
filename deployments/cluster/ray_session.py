"""One Ray session of this process, from its start to an end after which this process can end cleanly, too.

Ray's driver exports metrics in a thread of each session. OpenTelemetry's SDK, which Ray's library carries, shuts down
once in a process: it joins the thread of the first session, and the threads of later sessions run on after
`ray.shutdown()`. When the process ends, those threads export while the library's static objects are destroyed. Now and
then the process then dies of a segmentation fault in `_raylet.so`, after all of its work is done. So the driver exports
no metrics. Nothing is lost: what Ray and Ray Serve measure comes from the other processes of the cluster."""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from raylens.deployments.cluster.late_signals import signals_later

ResultT = TypeVar("ResultT")

_WITHOUT_METRICS = {"RAY_enable_open_telemetry": "0", "RAY_enable_metrics_collection": "0"}
_ROUTER_END_SECONDS = 10.0
_VITAL = ("raylet", "gcs_server")
_POLL_SECONDS = 0.2


@contextmanager
def ray_session(num_cpus: float, *, dashboard: bool = False, temp_dir: Path | None = None) -> Iterator[None]:
    """Runs a Ray cluster of this machine, with this process as its driver. Its folder is in `temp_dir`, by default in
    Ray's own place. A process may have several sessions, one after the other. Raises RuntimeError if Ray does not
    start."""
    # Imported only now: Ray reads its environment at import.
    import ray

    try:
        with _driver_starts():
            _start(num_cpus, dashboard, temp_dir)
        yield
    finally:
        _end_router_thread()
        ray.shutdown()


class NoRayError(RuntimeError):
    """The Ray that this process has started has ended, or does not answer."""


def ask_ray(call: Callable[[], ResultT], *, timeout_s: float) -> ResultT:
    """Returns the result of `call`, which asks the Ray that this process has started. Ray itself waits for answers of a
    cluster that has died, without a limit.

    Raises NoRayError if Ray ends, and after `timeout_s`."""
    answered = threading.Event()
    results: list[ResultT] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        answered.set()

    # A daemon: one that waits for ever is no reason for this process to stay.
    threading.Thread(target=ask, daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not answered.wait(_POLL_SECONDS):
        check_ray()
        if time.monotonic() > deadline:
            raise NoRayError(f"Ray does not answer after {timeout_s:g} s")
    if errors:
        raise errors[0]
    return results[0]


def check_ray() -> None:
    """Raises NoRayError if a process has ended that the Ray of this process cannot do without."""
    from ray._private.worker import _global_node

    for kind, process in [] if _global_node is None else _global_node.dead_processes():
        if kind in _VITAL:
            status = process.returncode
            how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
            raise NoRayError(f"Ray has ended: its process {kind} was ended {how}")


@contextmanager
def joined_cluster() -> Iterator[None]:
    """Makes this process a driver of the Ray cluster that runs on this node. The cluster stays after the block. Raises
    RuntimeError if no Ray runs here, or if it does not let this process in."""
    import ray

    try:
        with _driver_starts():
            _join()
        yield
    finally:
        _end_router_thread()
        ray.shutdown()


@contextmanager
def _driver_starts() -> Iterator[None]:
    """Around `ray.init`: a half-started driver can neither be stopped cleanly nor interrupted."""
    with _own_environment(_WITHOUT_METRICS), signals_later(), _own_sigterm_handler():
        yield


def _join() -> None:
    """Connects to Ray. Ray raises ConnectionError if it finds none here, and whatever comes up if the token is wrong;
    this raises RuntimeError."""
    import ray

    from raylens.deployments.cluster.driver_job import DriverJob

    try:
        ray.init(address="auto", job_config=DriverJob(), log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise RuntimeError("no Ray runs on this node: `raylens node` starts it") from error
    except Exception as error:
        raise RuntimeError(f"the Ray of this node cannot be joined: {error}") from error


def _start(num_cpus: float, dashboard: bool, temp_dir: Path | None) -> None:
    """Starts Ray. Ray raises a plain Exception if one of its processes does not come up in time; this raises
    RuntimeError."""
    import ray

    from raylens.deployments.cluster.driver_job import DriverJob
    from raylens.deployments.cluster.ray_node import one_machine

    try:
        with one_machine():
            ray.init(
                address="local",
                job_config=DriverJob(),
                num_cpus=num_cpus,
                include_dashboard=dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=None if temp_dir is None else str(temp_dir),
            )
    except Exception as error:
        raise RuntimeError(f"Ray did not start: {error}") from error


@contextmanager
def _own_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets the variables for this process alone while the block runs. Ray's library reads them here. The processes that
    Ray starts get `os.environ`, which stays as it is."""
    for name, value in variables.items():
        os.putenv(name, value)
    try:
        yield
    finally:
        for name in variables:
            if name in os.environ:
                os.putenv(name, os.environ[name])
            else:
                os.unsetenv(name)


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keeps Ray from installing its handler for SIGTERM, which would end the process at once."""
    from ray._private import utils

    def set_none(handler: object) -> None:
        """Stands in for Ray's function."""

    set_by_ray = utils.set_sigterm_handler
    utils.set_sigterm_handler = set_none
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_by_ray


def _end_router_thread() -> None:
    """Ends the thread in which Ray Serve routes this process's calls through handles, if there is one.

    Serve itself never ends it. It would record metrics every few seconds, in a later session and while the process
    ends.
    """
    serve = sys.modules.get("ray.serve._private.router")
    loop: asyncio.AbstractEventLoop | None = None if serve is None else serve.SingletonThreadRouter._asyncio_loop
    if serve is None or loop is None:
        return
    serve.SingletonThreadRouter._asyncio_loop = None  # handles of a later session start another
    threads = [thread for thread in threading.enumerate() if "(_run_router_event_loop)" in thread.name]
    asyncio.run_coroutine_threadsafe(_stop_loop(), loop)
    for thread in threads:
        thread.join(_ROUTER_END_SECONDS)


async def _stop_loop() -> None:
    """Ends all tasks of the loop, and the loop."""
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop.call_soon(loop.stop)
