"""Calls by a deployment's handle: their transport and event loop, their cancellation, references to pending results.

Ray 2.60: `handle.options(_by_reference=False)` calls by gRPC, which is faster than an actor task but carries no
references. A handle routes on an event loop in a thread of its own, which costs each call and answer a hop between
loops; `handle._init(_run_router_in_separate_loop=False)` routes on the caller's loop. The handle's router knows the
running replicas; the public `running_replicas_populated` tells only whether there has ever been one. `cancel()` does
nothing about a call that a replica has taken before the caller has asked for the result. A streaming call gives
references to objects that exist; its generator has private methods for references to objects that do not exist yet.
Needed: Generate gets short texts by gRPC and references by actor tasks. The ingress and the shards route on their only
loop, and learn at each request whether a stage is at rest or dead. A client that leaves ends its calls at any moment.
Generate gets references to embeddings while Encode computes them.
Test: `tests/deployments/ray_internals/test_on_ray.py`; `tests/deployments/ray_internals/test_cancelled_calls.py`;
`tests/deployments/ray_internals/test_pending_objects.py` has the failures.
Way back: public names for the option (ray-project/ray#59908, #61386), the loop (#61226) and the running replicas; a
`cancel()` that looks at the routed call (#52591 covers the router's own thread only); a fixed number of results of a
streaming call (#46934, open; #65243, open, would use the private methods in Ray Serve)."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray import ObjectRef
from ray.exceptions import ObjectRefStreamEndOfStreamError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator


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


def cancel_call(response: DeploymentResponse[Any] | DeploymentResponseGenerator[Any]) -> None:
    """Ends the call. Raises the call's error if it has reached no replica and failed."""
    response.cancel()
    routed = response._replica_result_future
    if routed.done() and not routed.cancelled() and routed.exception() is None:
        routed.result().cancel()


async def objects_of(
    response: DeploymentResponseGenerator[Any], number: int, on_pending: Callable[..., None]
) -> tuple[list[ObjectRef], Any]:
    """Returns references to the `number` objects that a stage yields, and the value of the last one.

    `on_pending` gets the references, one argument each, once a replica has taken the call. If the stage fails, a reader
    of the first one gets the stage's error; readers of the others learn only of the failure."""
    try:
        stream = await response._to_object_ref_gen()
        refs: list[ObjectRef] = stream._get_next_ref_n(number)  # no object has to exist yet
        on_pending(*refs)
        try:
            value = await refs[-1]
        except ObjectRefStreamEndOfStreamError:
            await refs[0]  # raises: the stage's error is the last of its objects
            raise
        stream._consume_next_ref_n(number)
        return refs, value
    except asyncio.CancelledError:
        with suppress(Exception):  # the reason, if the call never reached a replica
            cancel_call(response)
        raise
