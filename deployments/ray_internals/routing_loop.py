"""Calls that are routed on the caller's own event loop.

Ray 2.60: a handle routes its calls on an event loop in a thread of its own. Each call and each answer then wait for a
hop between the loops. `handle._init(_run_router_in_separate_loop=False)` routes on the loop of the caller;
`RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0` does so in all processes, drivers included, which have no loop.

Needed: the ingress and the shards have one loop, and route on it.

Test: `tests/deployments/ray_internals/test_on_ray.py`, `test_calls_are_routed_on_the_caller_s_loop`.

Way back: a public way to initialise a handle, or this as the default in replicas (ray-project/ray#61226)."""

from typing import Any

from ray.serve.handle import DeploymentHandle


def route_on_this_loop(*handles: DeploymentHandle[Any]) -> None:
    """Has calls routed on this process's only loop. Ray Serve's controller tells the handles their replicas from now
    on."""
    for handle in handles:
        if not handle.is_initialized:  # an inline encoder's is that of Generate
            handle._init(_run_router_in_separate_loop=False)
