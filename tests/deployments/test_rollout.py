"""Lines about a deployment that is under way, made of what Ray Serve says."""

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from raylens.deployments.launch.rollout import stage_lines, why_failed

NO_PLACE = (
    "Deployment 'Encode' in application 'raylens' has 1 replicas that have taken more than 30s to be scheduled. This"
    ' may be due to waiting for the cluster to scale. Resources required for each replica: {"CPU": 1.0, "gpu": 1.0}'
    ', total resources available: {"CPU": 3.0}. Use `ray status` for more details.'
)
RETRY = "A replica failed to start with exception. Retrying 2 more time(s). Error:\nTraceback:\n  ...\nValueError: no"


def application(
    status: DeploymentStatus, message: str = "", *, told: str = "", **states: int
) -> ApplicationStatusOverview:
    stage = DeploymentStatusOverview(
        status=status,
        status_trigger=DeploymentStatusTrigger.UNSPECIFIED,
        replica_states={ReplicaState(state): number for state, number in states.items()},
        message=message,
    )
    return ApplicationStatusOverview(ApplicationStatus.DEPLOYING, told, 0.0, {"Encode": stage})


@pytest.mark.parametrize(
    ("stage", "known", "line"),
    [
        (application(DeploymentStatus.UPDATING, STARTING=1, RUNNING=1), False, "starting, 1 of 2 replicas"),
        (application(DeploymentStatus.UPDATING, STARTING=1, RUNNING=1), True, "updating, 1 of 2 replicas"),
        (application(DeploymentStatus.UPDATING, STOPPING=1, RUNNING=1), True, "updating, 1 of 1 replicas, 1 ending"),
        (application(DeploymentStatus.HEALTHY, RUNNING=2), False, "ready, 2 of 2 replicas"),
        (application(DeploymentStatus.HEALTHY, NO_PLACE, RUNNING=2), False, "ready, 2 of 2 replicas"),
        (application(DeploymentStatus.UPSCALING, RUNNING=2, STARTING=1), True, "scaling up, 2 of 3 replicas"),
        (
            application(DeploymentStatus.UPDATING, NO_PLACE, STARTING=1),
            False,
            'starting, 0 of 1 replicas; no node has room for a replica that takes {"CPU": 1.0, "gpu": 1.0}',
        ),
        (
            application(DeploymentStatus.UPDATING, RETRY, STARTING=1),
            False,
            "starting, 0 of 1 replicas; tried again after: ValueError: no",
        ),
    ],
)
def test_a_line_says_how_far_a_stage_is(stage: ApplicationStatusOverview, known: bool, line: str) -> None:
    assert stage_lines(stage, known={"Encode"} if known else set(), missing={}) == {"Encode": f"Encode: {line}"}


def test_a_line_says_at_once_what_the_nodes_lack() -> None:
    missing = {"Encode": "1 GPU, and the cluster has none"}
    starting = application(DeploymentStatus.UPDATING, STARTING=1)
    line = "Encode: starting, 0 of 1 replicas; waits for 1 GPU, and the cluster has none"
    assert stage_lines(starting, known=set(), missing=missing) == {"Encode": line}
    ready = application(DeploymentStatus.HEALTHY, RUNNING=1)
    assert stage_lines(ready, known=set(), missing=missing) == {"Encode": "Encode: ready, 1 of 1 replicas"}


def test_there_is_no_line_about_a_stage_without_replicas() -> None:
    assert stage_lines(application(DeploymentStatus.UPDATING), known=set(), missing={}) == {}


def test_the_reason_of_a_failure_is_the_stage_s_own_or_that_of_the_builder() -> None:
    failed = application(DeploymentStatus.DEPLOY_FAILED, RETRY, told="Failed to update the deployments ['Encode'].")
    assert why_failed(failed) == "Encode did not start: ValueError: no"
    unbuilt = application(DeploymentStatus.HEALTHY, told="Traceback:\nModuleNotFoundError: No module named 'x'\n")
    assert why_failed(unbuilt) == "the application could not be built: ModuleNotFoundError: No module named 'x'"
