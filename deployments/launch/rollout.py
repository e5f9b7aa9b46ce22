"""Describes the progress of an application's stages for people, and why a stage did not start."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

_WORDS = {
    "HEALTHY": "ready",
    "UPSCALING": "scaling up",
    "DOWNSCALING": "scaling down",
    "UNHEALTHY": "unhealthy",
    "DEPLOY_FAILED": "failed",
}
_ENDING = ("STOPPING", "STOPPED")
_NO_PLACE = re.compile(r"Resources required for each replica: (.+?), total resources available")
_RETRY = "A replica failed to start"


def stage_lines(
    application: "ApplicationStatusOverview", *, known: set[str], missing: Mapping[str, str]
) -> Mapping[str, str]:
    """Returns a line about each stage that has replicas, such as `Encode: starting, 1 of 2 replicas`. `known`: the
    stages before this deployment. `missing`: the resources that the nodes lack, see `placement.lacking`."""
    return {
        name: f"{name}: {_progress(stage, name in known, missing.get(name))}"
        for name, stage in sorted(application.deployments.items())
        if stage.replica_states
    }


def _progress(stage: "DeploymentStatusOverview", was_there: bool, missing: str | None) -> str:
    counts = stage.replica_states
    total = sum(number for state, number in counts.items() if state not in _ENDING)
    word = _WORDS.get(stage.status, "updating" if was_there else "starting")
    line = f"{word}, {counts.get('RUNNING', 0)} of {total} replicas"
    if (ending := counts.get("STOPPING", 0)) > 0:
        line += f", {ending} ending"
    if stage.status == "HEALTHY":
        return line
    if missing is not None:
        return f"{line}; waits for {missing}"
    if found := _NO_PLACE.search(stage.message):
        return f"{line}; no node has room for a replica that takes {found[1]}"
    if stage.message.startswith(_RETRY):
        return f"{line}; tried again after: {_last_line(stage.message)}"
    return line


def failed_stages(application: "ApplicationStatusOverview") -> Mapping[str, str]:
    """Returns Ray Serve's traceback of each stage that did not start."""
    stages = application.deployments.items()
    return {name: stage.message for name, stage in stages if stage.status == "DEPLOY_FAILED"}


def why_failed(application: "ApplicationStatusOverview") -> str:
    """Returns one line with the last line of the traceback of each stage that did not start."""
    failed = failed_stages(application)
    if failed:
        return "; ".join(f"{name} did not start: {_last_line(message)}" for name, message in failed.items())
    return f"the application could not be built: {_last_line(application.message)}"


def _last_line(message: str) -> str:
    return (message.strip().splitlines() or ["no reason is known"])[-1]
