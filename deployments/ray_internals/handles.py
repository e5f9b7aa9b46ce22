"""Calls by a deployment's handle: their transport and event loop, and their cancellation.

Ray 2.60: `handle.options(_by_reference=False)` calls by gRPC, which is faster than an actor task but carries no
references. A handle routes on an event loop in a thread of its own, which costs each call and answer a hop between
loops; `handle._init(_run_router_in_separate_loop=False)` routes on the caller's loop. The handle's router knows the
running replicas; the public `running_replicas_populated` tells only whether there has ever been one. `cancel()` does
nothing about a call that a replica has taken before the caller has asked for the result.
Needed: an only replica of Generate, and texts, are called by gRPC. The ingress and the shards route on their only loop,
and learn at each request whether a stage is at rest or dead. A client that leaves ends its calls at any moment.
Test: `tests/deployments/ray_internals/test_on_ray.py`; `tests/deployments/ray_internals/test_cancelled_calls.py`.
Way back: public names for the option (ray-project/ray#59908, #61386), the loop (#61226) and the running replicas; a
`cancel()` that looks at the routed call (#52591 covers the router's own thread only)."""

from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponse


def by_grpc(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """Returns a handle of the same deployment and the same router that calls by gRPC."""
    return handle.options(_by_reference=False)


def route_on_this_loop(*handles: DeploymentHandle[Any]) -> None:
    """Routes calls on this process's only loop. From now on, Ray Serve's controller reports replicas to the handles."""
    for handle in handles:
        if not handle.is_initialized:  # an inline encoder's handle is that of Generate
            handle._init(_run_router_in_separate_loop=False)


def num_running_replicas(handle: DeploymentHandle[Any]) -> int:
    """Returns the last number that the controller reported. Call `route_on_this_loop` before."""
    router = handle._router._asyncio_router.request_router
    return 0 if router is None else len(router.curr_replicas)


def has_running_replica(handle: DeploymentHandle[Any]) -> bool:
    return num_running_replicas(handle) > 0


def cancel_call(response: DeploymentResponse[Any]) -> None:
    """Ends the call. Raises the call's error if it has reached no replica and failed."""
    response.cancel()
    routed = response._replica_result_future
    if routed.done() and not routed.cancelled() and routed.exception() is None:
        routed.result().cancel()
