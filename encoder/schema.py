"""The requests and outputs of the encoder engine."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from preprocess.schema import ItemTensors


@dataclass(slots=True)
class EncodeRequest:
    """One item to encode. `num_patches` is its cost. Items are encoded together only where their `batch_key`s are
    equal. `arrival_time` is in seconds of `time.perf_counter`."""

    request_id: str
    modality: str
    tensors: ItemTensors
    num_patches: int
    batch_key: Hashable
    arrival_time: float


@dataclass(slots=True)
class EncodeOutput:
    """The embeddings of one item, (num_embeds, embedding_size) on the CPU, or the error that ended the item.

    Overlapped staging puts the embeddings into pinned memory. `queue_seconds` is the time from the item's arrival to
    the start of its batch, `encode_seconds` that of the whole batch, which had `batch_size` items.
    """

    request_id: str
    embeddings: torch.Tensor | None
    error: Exception | None
    queue_seconds: float
    encode_seconds: float
    batch_size: int
