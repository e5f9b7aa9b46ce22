"""Starts and ends an application for a user at a prompt: `serve.run` and `serve.delete` poll only once a second."""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from raylens.deployments.cluster.ray_session import ask_ray
from raylens.deployments.launch.rollout import failed_stages, why_failed
from raylens.deployments.load_progress import LoadProgress
from raylens.deployments.ray_internals.serve_client import begin_deletion

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.schema import ApplicationStatusOverview, ServeStatus

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
    ask_ray(partial(begin_deletion, name), timeout_s=answer_s)
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
