"""Starts and ends an application for a user at a prompt: `serve.run` and `serve.delete` poll only once a second."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raylens.deployments.cluster.ray_session import NoRayError, ask_ray
from raylens.deployments.launch.rollout import failed_stages, why_failed
from raylens.deployments.ray_internals.serve_client import begin_deletion

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.schema import ApplicationStatusOverview, ServeStatus

_LEAST_CPU_SHARE = 0.03  # of a core, by one process; a waiting replica takes up to 0.02 for Ray
_LEAST_BYTES = 2**20  # read or written by one process; a slow network drive delivers as many each second
_LOADING = (b"ray::ServeReplica:", b"ray::GenerateRank")  # prefixes of the titles of loading processes
_HAS_PROC = Path("/proc/self/io").exists()
_Work = tuple[float, int]  # CPU seconds, and bytes read and written
_POLL_SECONDS = 0.1
_START_SECONDS = 300.0
_QUIET_SECONDS = 60.0
"""After _START_SECONDS, a start fails once no stage has worked for this long: large models may take an hour."""
_END_SECONDS = 60.0
_ANSWER_SECONDS = 60.0  # Ray answers within milliseconds, except on a busy machine


def start_app(app: "Application", name: str, logging_config: dict[str, object], say: Callable[[str], None]) -> None:
    """Deploys the application at the route `/`; returns once all replicas run. `say` gets a line for each change of
    state. Raises RuntimeError if a stage fails, or after minutes without work; NoRayError if Ray ends."""
    from ray import serve

    target = serve.RunTarget(app, name=name, route_prefix="/", logging_config=logging_config)
    waits = {"wait_for_ingress_deployment_creation": False, "wait_for_applications_running": False}
    ask_ray(partial(serve.run_many, [target], **waits), timeout_s=_ANSWER_SECONDS)
    started, last = time.monotonic(), ""
    progress: LoadProgress | None = None
    while (application := _status(_ANSWER_SECONDS).applications[name]).status != "RUNNING":
        if application.status == "DEPLOY_FAILED":
            tracebacks = RuntimeError("\n".join(failed_stages(application).values()))
            raise RuntimeError(why_failed(application)) from tracebacks
        line, seconds = _states(application), time.monotonic() - started
        if line != last:
            say(f"{seconds:5.1f} s  {line}")
            last = line
        if seconds > _START_SECONDS:
            progress = progress or LoadProgress(_QUIET_SECONDS)
            if progress.is_over():
                silence = f"no stage has worked for {_QUIET_SECONDS:.0f} s, {seconds:.0f} s after the start"
                raise RuntimeError(f"{silence}: {line}")
        time.sleep(_POLL_SECONDS)


def end_app(name: str, *, within_s: float = _END_SECONDS, answer_s: float = _ANSWER_SECONDS) -> None:
    """Deletes the application; returns once its last replica has ended. Raises RuntimeError if a replica still runs
    after `within_s`, NoRayError if Ray ends or takes longer than `answer_s` for one answer."""
    from ray.exceptions import RayError

    try:
        ask_ray(partial(begin_deletion, name), timeout_s=answer_s)
    except RayError as error:
        raise NoRayError(f"Ray is ending: it cannot delete {name}") from error
    deadline = time.monotonic() + within_s
    while name in _status(answer_s).applications:
        if time.monotonic() > deadline:
            raise RuntimeError(f"replicas of {name} run on after {within_s:.0f} s")
        time.sleep(_POLL_SECONDS)


def _status(timeout_s: float) -> "ServeStatus":
    from ray import serve

    return ask_ray(serve.status, timeout_s=timeout_s)


def _states(application: "ApplicationStatusOverview") -> str:
    words = {"healthy": "ready", "updating": "loading"}
    states = sorted((name, stage.status.lower()) for name, stage in application.deployments.items())
    # A further model's stage ends with the model's name, which keeps its case.
    return ", ".join(f"{name[0].lower()}{name[1:]} {words.get(state, state)}" for name, state in states)


class LoadProgress:
    """Watches the replicas and ranks that this process started. A load is over after `quiet_seconds` without work."""

    def __init__(self, quiet_seconds: float) -> None:
        self._quiet_seconds = quiet_seconds
        self._since = time.monotonic()
        self._then = dict(_work_done())

    def is_over(self) -> bool:
        """Returns whether no process has worked for `quiet_seconds`. Always False outside Linux."""
        now, work = time.monotonic(), dict(_work_done())
        for pid, (cpu_seconds, num_bytes) in work.items():
            cpu_before, bytes_before = self._then.get(pid, (0.0, 0))
            cpu_share = (cpu_seconds - cpu_before) / self._quiet_seconds
            if cpu_share >= _LEAST_CPU_SHARE or num_bytes - bytes_before >= _LEAST_BYTES:
                self._since, self._then = now, work
                break
        return _HAS_PROC and now - self._since >= self._quiet_seconds


def _work_done() -> Iterator[tuple[int, _Work]]:
    """Yields the replicas and ranks below this process, each with its work so far."""
    parents: dict[int, int] = {}
    work: dict[int, _Work] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or another user's
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            pid = int(folder.name)
            parents[pid] = int(fields[1])
            if (folder / "cmdline").read_bytes().startswith(_LOADING):
                ticks = int(fields[11]) + int(fields[12])
                counters = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
                num_bytes = sum(int(counters[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
                work[pid] = ticks / os.sysconf("SC_CLK_TCK"), num_bytes
    for pid, done in work.items():
        ancestor = pid
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        if ancestor:
            yield pid, done
