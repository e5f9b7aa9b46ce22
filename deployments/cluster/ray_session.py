"""One Ray session of this process, with a clean end."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raylens.deployments.free_port import free_ports
from raylens.deployments.ray_internals import driver

ResultT = TypeVar("ResultT")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # a closing terminal sends SIGHUP
_POLL_SECONDS = 0.2


@contextmanager
def ray_session(num_cpus: float, *, dashboard: bool = False, temp_dir: Path | None = None) -> Iterator[None]:
    """Runs a Ray cluster of this machine with this process as its driver. `temp_dir`: parent of its folder, by default
    Ray's own. A process may have several sessions, one after the other. Raises RuntimeError if Ray does not start."""
    with _driver(partial(_start, num_cpus, dashboard, temp_dir)):
        yield


class NoRayError(RuntimeError):
    """This process's Ray has ended or does not answer."""


def ask_ray(call: Callable[[], ResultT], *, timeout_s: float) -> ResultT:
    """Returns the result of `call`, a query to this driver's Ray. Raises NoRayError if Ray ends, and after `timeout_s`:
    Ray itself would wait for a dead cluster without a limit."""
    answer: Future[ResultT] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    # A daemon thread, so that a hung call does not keep this process alive.
    threading.Thread(target=ask, daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not wait([answer], timeout=_POLL_SECONDS).done:
        check_ray()
        if time.monotonic() > deadline:
            raise NoRayError(f"Ray does not answer after {timeout_s:g} s")
    return answer.result()


def check_ray() -> None:
    """Raises NoRayError if one of Ray's vital processes has ended."""
    if (ended := driver.ended_vital_process()) is not None:
        kind, status = ended
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        raise NoRayError(f"Ray has ended: its process {kind} was ended {how}")


@contextmanager
def joined_cluster() -> Iterator[None]:
    """Makes this process a driver of this node's Ray. Raises RuntimeError if none runs or it refuses the connection."""
    with _driver(_join):
        yield


@contextmanager
def _driver(begin: Callable[[], None]) -> Iterator[None]:
    # Imported late, because Ray reads its environment at import.
    import ray

    try:
        # A half-started driver can neither be stopped cleanly nor interrupted.
        with driver.no_driver_metrics(), signals_later(), driver.own_sigterm_handler():
            begin()
        yield
    finally:
        driver.end_router_thread()
        ray.shutdown()


def _join() -> None:
    """Connects to Ray, which raises ConnectionError if none runs here, and various errors for a wrong token."""
    import ray

    try:
        ray.init(address="auto", job_config=driver.driver_job(), log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise RuntimeError("no Ray runs on this node: `raylens node` starts it") from error
    except Exception as error:
        raise RuntimeError(f"the Ray of this node cannot be joined: {error}") from error


def _start(num_cpus: float, dashboard: bool, temp_dir: Path | None) -> None:
    """Starts Ray, which raises a plain Exception if one of its processes does not start in time."""
    import ray

    from raylens.deployments.ray_internals.one_machine import NUM_AGENTS_PORTS, one_machine

    try:
        with one_machine(temp_dir, free_ports(NUM_AGENTS_PORTS)) as private:
            ray.init(
                address="local",
                job_config=driver.driver_job(),
                num_cpus=num_cpus,
                include_dashboard=dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **private,
            )
    except Exception as error:
        raise RuntimeError(f"Ray did not start: {error}") from error


@contextmanager
def signals_later() -> Iterator[None]:
    """Delays `STOP_SIGNALS` until the block ends. Does nothing outside the main thread, which alone handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handled = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
