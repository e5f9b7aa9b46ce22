"""References to Ray's objects as bytes, for messages that do not go through Ray.

Ray 2.60: Ray counts references in calls and their results only. A reference that is serialized in any other way
(`cloudpickle`) keeps its object until the process ends; `RAY_allow_out_of_band_object_ref_serialization=0` forbids it.
Needed: the ingress and the shards send references over their own connections. Ray keeps the object only as long as its
owner holds a reference, so the sender keeps its own until the receiver needs the object no more, or has gone.
Test: `tests/deployments/ray_internals/test_references.py`.
Way back: export of a reference without pinning its object (ray-project/ray#12863 and #23259, both closed)."""

from collections.abc import Sequence
from typing import TypeAlias

from ray import ObjectRef
from ray._private.worker import global_worker
from ray.core.generated.common_pb2 import Address
from ray.core.generated.core_worker_pb2 import GetObjectStatusReply

_ID_BYTES = 28
PackedReference: TypeAlias = tuple[bytes, bytes, bytes]
"""The object's id, its owner's address, and its known state."""


def pack_reference(ref: ObjectRef) -> PackedReference:
    _, owner, state = global_worker.core_worker.serialize_object_ref(ref)
    return ref.binary(), owner, state


def unpack_reference(packed: Sequence[bytes]) -> ObjectRef:
    """Returns the reference, which can be awaited and given to calls. Raises ValueError if the bytes are none."""
    object_id, owner, state = packed
    address, known = Address.FromString(owner), GetObjectStatusReply.FromString(state)
    if any(len(one) != _ID_BYTES for one in (object_id, address.node_id, address.worker_id, *known.node_ids)):
        raise ValueError("an id of another length")  # with which Ray would end this process
    ref = ObjectRef(object_id, owner)
    global_worker.core_worker.deserialize_and_register_object_ref(object_id, ObjectRef.nil(), owner, state)
    return ref
