"""References to objects of Ray as bytes, for messages that do not go through Ray.

Ray counts references that travel in calls and in their results. It does not see these: it keeps the object only as long
as its owner holds a reference. So whoever sends one keeps it until the receiver has said that it needs the object no
more, or has gone.

This uses two private functions of Ray, which is pinned; the tests run a real cluster."""

from collections.abc import Sequence
from typing import TypeAlias

from ray import ObjectRef
from ray._private.worker import global_worker
from ray.core.generated.common_pb2 import Address
from ray.core.generated.core_worker_pb2 import GetObjectStatusReply

_ID_BYTES = 28
PackedReference: TypeAlias = tuple[bytes, bytes, bytes]
"""The object's id, its owner's address, and what is known of its state."""


def pack_reference(ref: ObjectRef) -> PackedReference:
    _, owner, state = global_worker.core_worker.serialize_object_ref(ref)
    return ref.binary(), owner, state


def unpack_reference(packed: Sequence[bytes]) -> ObjectRef:
    """Returns the reference, which can be awaited and given to calls like any other. Raises ValueError for what is
    none."""
    object_id, owner, state = packed
    address, known = Address.FromString(owner), GetObjectStatusReply.FromString(state)
    if any(len(one) != _ID_BYTES for one in (object_id, address.node_id, address.worker_id, *known.node_ids)):
        raise ValueError("an id of another length")  # with which Ray would end this process
    ref = ObjectRef(object_id, owner)
    global_worker.core_worker.deserialize_and_register_object_ref(object_id, ObjectRef.nil(), owner, state)
    return ref
