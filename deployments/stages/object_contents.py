"""Sends file contents between processes: large ones go through Ray's object store."""

import asyncio

import numpy as np
import ray
from ray import ObjectRef

IN_MESSAGE_BYTES = 2**15  # the largest content inside a message; a larger message would delay others


async def sent(content: bytes) -> bytes | ObjectRef:
    """Returns the content, or a reference that the sender must keep until the receiver has the content."""
    if len(content) <= IN_MESSAGE_BYTES:
        return content
    return await asyncio.to_thread(ray.put, np.frombuffer(content, np.uint8))


async def received(content: bytes | ObjectRef) -> bytes:
    return (await content).tobytes() if isinstance(content, ObjectRef) else content
