"""A step as one message of bytes, for the other ranks."""

import json
from dataclasses import fields

import torch

from llm.step_input import StepInput

# Multiples of every dtype's size, so that the tensors of a received message are views into it.
_ALIGNMENT = 16
_STOP = torch.empty(0, dtype=torch.uint8)


def pack(step: StepInput | None) -> torch.Tensor:
    """One message of uint8: a JSON header of shapes and dtypes, then the tensors' bytes. None means stop."""
    if step is None:
        return _STOP
    # Copied: what has a single element may be contiguous with a stride that no view of bytes can have.
    tensors = [getattr(step, field.name).clone(memory_format=torch.contiguous_format) for field in fields(step)]
    header = json.dumps([[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]).encode()
    parts = [
        torch.tensor([len(header)], dtype=torch.int64).view(torch.uint8),
        torch.frombuffer(bytearray(header), dtype=torch.uint8),
        torch.zeros(-(8 + len(header)) % _ALIGNMENT, dtype=torch.uint8),
    ]
    for tensor in tensors:
        data = tensor.flatten().view(torch.uint8)
        parts += [data, torch.zeros(-data.numel() % _ALIGNMENT, dtype=torch.uint8)]
    return torch.cat(parts)


def unpack(message: torch.Tensor) -> StepInput | None:
    """The inverse of `pack`; the tensors are views into `message`."""
    if not message.numel():
        return None
    header_bytes = int(message[:8].view(torch.int64))
    header = json.loads(bytes(message[8 : 8 + header_bytes].tolist()))
    offset = 8 + header_bytes + -(8 + header_bytes) % _ALIGNMENT
    tensors = []
    for dtype_name, shape in header:
        dtype = getattr(torch, dtype_name)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        tensors.append(message[offset : offset + num_bytes].view(dtype).view(shape))
        offset += num_bytes + -num_bytes % _ALIGNMENT
    return StepInput(*tensors)
