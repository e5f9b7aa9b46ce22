"""What goes into the encoder engine and what comes out."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from preprocess.schema import ItemTensors


@dataclass(slots=True)
class EncodeRequest:
    """One item to encode. `num_patches`: what it costs; items are encoded together only where their `batch_key` is
    equal. `arrival_time` in seconds of `time.perf_counter`."""

    request_id: str
    modality: str
    tensors: ItemTensors
    num_patches: int
    batch_key: Hashable
    arrival_time: float


@dataclass(slots=True)
class EncodeOutput:
    """The embeddings of one item, (num_embeds, embedding_size) on the CPU, or the error that ended it. From a GPU they
    come in pinned memory.

    Times in seconds: `queue_seconds` from arrival to the batch's start, `encode_seconds` of the whole batch, which had
    `batch_size` items.
    """

    request_id: str
    embeddings: torch.Tensor | None
    error: Exception | None
    queue_seconds: float
    encode_seconds: float
    batch_size: int
