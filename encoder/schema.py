"""What goes into the encoder engine and what comes out."""

from dataclasses import dataclass

import torch

from preprocess.schema import ItemTensors


@dataclass(slots=True)
class EncodeRequest:
    """One item to encode. `arrival_time` in seconds of `time.perf_counter`."""

    request_id: str
    tensors: ItemTensors
    arrival_time: float

    @property
    def batch_key(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Items with equal keys (same tensor names and shapes) can be stacked into one batch."""
        return tuple((name, tuple(tensor.shape)) for name, tensor in sorted(self.tensors.items()))


@dataclass(slots=True)
class EncodeOutput:
    """The embeddings of one item, (num_tokens, hidden_size) on the CPU, or the error that ended it.

    Times in seconds: `queue_seconds` from arrival to the batch's start, `encode_seconds` of the whole batch.
    """

    request_id: str
    embeddings: torch.Tensor | None
    error: Exception | None
    queue_seconds: float
    encode_seconds: float
    batch_size: int
