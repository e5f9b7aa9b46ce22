"""Calls of a deployment by gRPC.

Ray 2.60: a handle calls by actor tasks, which carry references to objects. `handle.options(_by_reference=False)` makes
it call by gRPC, which is faster and carries none. The underscore marks the option as private.

Needed: both kinds for one deployment. A short text reaches Generate by gRPC; a prompt with items carries references.

Test: `tests/deployments/ray_internals/test_on_ray.py`, `test_calls_by_grpc_and_by_reference_go_through_one_router`.

Way back: the option under a public name. ray-project/ray#59908 brought it, and #61386 documents the transport."""

from typing import Any

from ray.serve.handle import DeploymentHandle


def by_grpc(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """Returns a handle of the same deployment and the same router that calls by gRPC."""
    return handle.options(_by_reference=False)
