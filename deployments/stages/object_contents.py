"""Sends file contents between processes: large ones go through Ray's object store."""

import asyncio

import numpy as np
import ray
from ray import ObjectRef

from raylens.deployments.ray_internals.references import PackedReference

IN_MESSAGE_BYTES = 2**16
"""The largest content inside a message. A larger message would delay others, and Ray copies larger arguments twice."""


async def stored(content: bytes) -> bytes | ObjectRef:
    """Returns the content, or a reference. The sender must keep the reference until the receiver has the content."""
    if len(content) <= IN_MESSAGE_BYTES:
        return content
    return await asyncio.to_thread(ray.put, np.frombuffer(content, np.uint8))


def sent(content: bytes | ObjectRef) -> bytes | PackedReference:
    return PackedReference.of(content) if isinstance(content, ObjectRef) else content


async def received(content: bytes | PackedReference) -> bytes:
    return (await content.unpack()).tobytes() if isinstance(content, PackedReference) else content
