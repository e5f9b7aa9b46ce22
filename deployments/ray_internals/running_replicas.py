"""Whether a deployment has a replica that runs.

Ray 2.60: the router of a handle knows the running replicas. Ray Serve's controller tells every router at once. The
handle's public method `running_replicas_populated` tells only whether there has ever been one. `serve.status()` asks
the controller each time.

Needed: for each request, the ingress tells a stage at rest from one that has died, and items go to an encoder that
runs.

Test: `tests/deployments/ray_internals/test_on_ray.py`, `test_a_handle_knows_whether_a_replica_runs`.

Way back: a public property of the handle. No issue is known."""

from typing import Any

from ray.serve.handle import DeploymentHandle


def num_running_replicas(handle: DeploymentHandle[Any]) -> int:
    """Returns how many run, as far as this process has heard. Call `route_on_this_loop` before."""
    router = handle._router._asyncio_router.request_router
    return 0 if router is None else len(router.curr_replicas)


def has_running_replica(handle: DeploymentHandle[Any]) -> bool:
    """See `num_running_replicas`."""
    return num_running_replicas(handle) > 0
