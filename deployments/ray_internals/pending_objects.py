"""References to what a stage yields, before it has yielded any.

Ray 2.60: a call that streams gives a reference to each object once the object exists. The generator of references has
private methods for references to the next objects, whether they exist or not.

Needed: a reference to the embeddings goes to Generate while Encode still computes them.

Test: `tests/deployments/ray_internals/test_on_ray.py`, `test_references_to_objects_come_before_the_objects`;
`tests/deployments/ray_internals/test_pending_objects.py` has the failures.

Way back: a fixed number of results of a streaming call (ray-project/ray#46934, open). ray-project/ray#62741 brought the
private methods, and #65243 (open) would use them in Ray Serve."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray import ObjectRef
from ray.exceptions import ObjectRefStreamEndOfStreamError
from ray.serve.handle import DeploymentResponseGenerator

from raylens.deployments.ray_internals.cancelled_calls import cancel_call


async def objects_of(
    response: DeploymentResponseGenerator[Any], number: int, on_pending: Callable[..., None]
) -> tuple[list[ObjectRef], Any]:
    """Returns references to the `number` objects that a stage makes, and the value of the last. The others stay in the
    object store.

    `on_pending` gets the references, one argument each, as soon as a replica has taken the call. A reader of the first
    gets the stage's error if the stage fails before it has made the object; readers of the others learn only that it
    failed.
    """
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
        # If the call never reached a replica, cancelling it raises the reason.
        with suppress(Exception):
            cancel_call(response)
        raise
