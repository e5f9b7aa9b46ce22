"""The end of a call whose answer nobody waits for any more.

Ray 2.60: `response.cancel()` ends a call that waits for a replica, or whose result this process has asked for. It does
nothing about a call that a replica has taken before anybody has asked for the result.

Needed: a client that leaves ends the work for it, at whatever moment.

Test: `tests/deployments/ray_internals/test_cancelled_calls.py`.

Way back: a `cancel()` that looks at the future of the routed call. ray-project/ray#52533 described calls that go on
after their cancellation; its fix (#52591) covers the router's own thread, not a router on the caller's loop."""

from typing import Any

from ray.serve.handle import DeploymentResponse, DeploymentResponseGenerator


def cancel_call(response: DeploymentResponse[Any] | DeploymentResponseGenerator[Any]) -> None:
    """Ends the call. Raises the call's error if it has reached no replica and failed."""
    response.cancel()
    routed = response._replica_result_future
    if routed.done() and not routed.cancelled() and routed.exception() is None:
        routed.result().cancel()
