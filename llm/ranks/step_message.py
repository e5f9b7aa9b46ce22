"""Packs a step into one message of bytes for the other ranks, and unpacks it there. The message has no adapters,
because a model on several ranks serves none."""

import json
from collections.abc import Sequence
from itertools import accumulate, chain

import torch

from raylens.llm.step_input import StepInput

# A multiple of every dtype's size, so that the tensors can be views into a received message.
_ALIGNMENT = 16
_NO_EMBEDS = torch.empty(0, 0)
_STOP = torch.empty(0, dtype=torch.uint8)


def pack(step: StepInput | None) -> torch.Tensor:
    """Returns the message of a step, uint8: a JSON header of dtypes and shapes, then the tensors' bytes. None gives the
    empty message, which means stop."""
    if step is None:
        return _STOP
    assert step.fed is None, "the ranks get all tokens from rank 0's host"
    # Cloned, because a single-element tensor counts as contiguous even with a stride that a view as bytes rejects.
    tensors = [tensor.clone(memory_format=torch.contiguous_format) for tensor in _to_tensors(step)]
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
    """Returns the step of a message of `pack`, or None for stop. The step's tensors are views into `message`."""
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
    return _from_tensors(tensors)


def _to_tensors(step: StepInput) -> list[torch.Tensor]:
    return [
        step.token_ids,
        step.positions,
        step.slot_mapping,
        step.logits_rows,
        step.embed_rows,
        torch.cat(step.embeds) if step.embeds else _NO_EMBEDS,
        _int64([len(table) for table in step.block_tables]),
        _int64(list(chain(*step.block_tables))),
        _int64(step.query_lengths),
        _int64(step.context_lengths),
        _int64(step.prompt_lengths),
        _int64(list(chain(*step.span_members))),
        _int64(list(chain(*step.scored))),
    ]


def _from_tensors(tensors: list[torch.Tensor]) -> StepInput:
    token_ids, positions, slots, logits_rows, embed_rows, embeds = tensors[:6]
    lists = [tensor.tolist() for tensor in tensors[6:]]
    table_lengths, block_ids, query_lengths, context_lengths, prompt_lengths, span_members, scored = lists
    ends = list(accumulate(table_lengths))
    tables = [block_ids[end - length : end] for length, end in zip(table_lengths, ends, strict=True)]
    return StepInput(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        logits_rows=logits_rows,
        embed_rows=embed_rows,
        embeds=[embeds] if len(embeds) else [],
        block_tables=tables,
        query_lengths=query_lengths,
        context_lengths=context_lengths,
        prompt_lengths=prompt_lengths,
        span_members=_triples(span_members),
        scored=_triples(scored),
    )


def _int64(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _triples(values: list[int]) -> list[tuple[int, int, int]]:
    return list(zip(values[::3], values[1::3], values[2::3], strict=True))
