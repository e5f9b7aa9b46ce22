"""What every rank has to know of one step: plain tensors on the CPU, packed into one message."""

import json
from dataclasses import dataclass, fields

import torch

# Multiples of every dtype's size, so that the tensors of a received message are views into it.
_ALIGNMENT = 16
_STOP = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step's chunks, flattened one behind the other; integers are int64.

    token_ids (num_tokens,): any valid id where `embed_rows` overlays an item's embeddings
    positions (..., num_tokens): rotary positions
    slot_mapping (num_tokens,): where keys and values go, block_id * block_size + offset
    block_tables (num_chunks, max_blocks): padded with block 0
    query_lengths, context_lengths (num_chunks,): tokens of the chunk; positions up to its end
    sampling_rows (num_sampling,): the tokens whose logits are wanted
    embed_rows (num_embeds,), embeds (num_embeds, embedding_size): embeddings that replace those of the token ids
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_lengths: torch.Tensor
    context_lengths: torch.Tensor
    sampling_rows: torch.Tensor
    embed_rows: torch.Tensor
    embeds: torch.Tensor


def pack(step: StepInput | None) -> torch.Tensor:
    """One message of uint8: a JSON header of shapes and dtypes, then the tensors' bytes. None means stop."""
    if step is None:
        return _STOP
    tensors = [getattr(step, field.name).contiguous() for field in fields(step)]
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
