"""Contents of files on their way between processes: a large one goes through Ray's object store."""

import asyncio

import numpy as np
import ray
from ray import ObjectRef

IN_MESSAGE_BYTES = 2**15
"""The most that goes in a message itself. While a longer one is written and read, others would wait."""


async def sent(content: bytes) -> bytes | ObjectRef:
    """Returns what to send of a content. The sender has to keep a reference until the receiver has the content."""
    if len(content) <= IN_MESSAGE_BYTES:
        return content
    return await asyncio.to_thread(ray.put, np.frombuffer(content, np.uint8))


async def received(content: bytes | ObjectRef) -> bytes:
    """Returns the content of what was `sent`."""
    return (await content).tobytes() if isinstance(content, ObjectRef) else content
