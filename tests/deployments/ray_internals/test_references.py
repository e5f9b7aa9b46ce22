"""References as bytes: what comes out of them is a reference or an error, whatever the bytes are."""

import random
from contextlib import suppress
from dataclasses import astuple, replace

import pytest
import ray
from google.protobuf.message import DecodeError
from ray.core.generated.common_pb2 import Address

from raylens.deployments.ray_internals.references import PackedReference


def test_references_with_wrong_bytes_are_references_or_errors(ray_port: int) -> None:
    """Ray itself ends the process where an id in them has another length."""
    ref = ray.put("kept")
    packed, generator = PackedReference.of(ref), random.Random(1)
    for _ in range(500):
        parts = [bytearray(part) for part in astuple(packed)]
        for _ in range(generator.randint(1, 3)):
            part = generator.choice(parts)
            place = generator.randrange(len(part))
            part[place : place + generator.randint(0, 3)] = generator.randbytes(generator.randint(0, 3))
        with suppress(ValueError, DecodeError):
            PackedReference(*map(bytes, parts)).unpack()
    assert ray.get(packed.unpack()) == "kept"
    assert replace(packed, state=b"") == packed, "it refers to the same object"


@pytest.mark.parametrize("part", ["node_id", "worker_id"])
@pytest.mark.parametrize("value", [b"", b"x" * 27, b"x" * 29])
def test_an_owner_with_an_id_of_another_length_is_an_error(ray_port: int, part: str, value: bytes) -> None:
    packed = PackedReference.of(ray.put("kept"))
    address = Address.FromString(packed.owner)
    setattr(address, part, value)
    with pytest.raises(ValueError, match="an id of another length"):
        replace(packed, owner=address.SerializeToString()).unpack()
