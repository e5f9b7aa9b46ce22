"""References to Ray's objects as bytes, for messages that do not go through Ray.

Ray 2.60: Ray counts references in calls and their results only. A reference that is serialized in any other way
(`cloudpickle`) keeps its object until the process ends; `RAY_allow_out_of_band_object_ref_serialization=0` forbids it.
Each process that holds a reference takes part in counting it.
Needed: the ingress and the shards send references over their own connections, and calls by gRPC carry them. A process
that only passes a reference on leaves it packed. Ray keeps the object only as long as its owner holds a reference, so
the sender keeps its own until the receiver needs the object no more, or has gone.
Test: `tests/deployments/ray_internals/test_references.py`.
Way back: export of a reference without pinning its object (ray-project/ray#12863 and #23259, both closed)."""

from dataclasses import dataclass, field
from typing import Self

from ray import ObjectRef
from ray._private.worker import global_worker
from ray.core.generated.common_pb2 import Address
from ray.core.generated.core_worker_pb2 import GetObjectStatusReply

_ID_BYTES = 28


@dataclass(frozen=True, slots=True)
class PackedReference:
    """`owner`: the address of the object's owner. `state`: what was known of the object. References are equal if they
    refer to the same object."""

    object_id: bytes
    owner: bytes = field(compare=False)
    state: bytes = field(compare=False)

    @classmethod
    def of(cls, ref: ObjectRef) -> Self:
        _, owner, state = global_worker.core_worker.serialize_object_ref(ref)
        return cls(ref.binary(), owner, state)

    def unpack(self) -> ObjectRef:
        """Returns a reference that can be awaited and given to calls. Raises ValueError if the bytes are none."""
        address, known = Address.FromString(self.owner), GetObjectStatusReply.FromString(self.state)
        ids = (self.object_id, address.node_id, address.worker_id, *known.node_ids)
        if any(len(one) != _ID_BYTES for one in ids):
            raise ValueError("an id of another length")  # with which Ray would end this process
        ref = ObjectRef(self.object_id, self.owner)
        global_worker.core_worker.deserialize_and_register_object_ref(
            self.object_id, ObjectRef.nil(), self.owner, self.state
        )
        return ref
