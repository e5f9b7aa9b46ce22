"""The encoder engine: `add_request`, then `step` until `has_unfinished` is false. Synchronous, one thread."""

import time

import torch

from encoder.config import EncoderConfig
from encoder.loader import load_vision_half
from encoder.scheduler import EncoderScheduler
from encoder.schema import EncodeOutput, EncodeRequest
from preprocess.schema import ItemTensors


class EncoderEngine:
    """Batches what is waiting and runs the vision half over it."""

    def __init__(self, config: EncoderConfig, *, max_batch_size: int = 16) -> None:
        self._device = torch.device(config.tower.device)
        self._model, self._family = load_vision_half(config)
        self._scheduler = EncoderScheduler(max_batch_size)

    def add_request(self, request_id: str, tensors: ItemTensors) -> None:
        """Queues one item's tensors; its embeddings come out of a later `step`."""
        self._scheduler.add(EncodeRequest(request_id, tensors, time.perf_counter()))

    def abort(self, request_id: str) -> None:
        """Forgets an item that still waits; does nothing for one that is done or unknown."""
        self._scheduler.abort(request_id)

    def has_unfinished(self) -> bool:
        return len(self._scheduler) > 0

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing before the next request comes."""
        return not self.has_unfinished()

    def step(self) -> list[EncodeOutput]:
        """Encodes the next batch. Every item taken gets exactly one output; one that failed carries its error."""
        batch = self._scheduler.schedule()
        try:
            return self._encode(batch)
        except torch.AcceleratorError:
            raise  # the device itself has failed: every later step would, too
        except Exception:
            # One bad item must not take its neighbours along: each is tried alone.
            return [self._encode_alone(request) for request in batch]

    def _encode_alone(self, request: EncodeRequest) -> EncodeOutput:
        try:
            return self._encode([request])[0]
        except Exception as error:
            return EncodeOutput(request.request_id, None, error, 0.0, 0.0, 1)

    @torch.inference_mode()
    def _encode(self, batch: list[EncodeRequest]) -> list[EncodeOutput]:
        if not batch:
            return []
        started = time.perf_counter()
        items = [
            {name: tensor.to(self._device, non_blocking=True) for name, tensor in request.tensors.items()}
            for request in batch
        ]
        features = self._family.modalities["image"].encode(self._model, items)
        # Each item leaves as a tensor of its own memory: a view would ship and keep the whole batch.
        embeddings = [item.to("cpu", copy=True).contiguous() for item in features]
        seconds = time.perf_counter() - started
        return [
            EncodeOutput(
                request_id=request.request_id,
                embeddings=item,
                error=None,
                queue_seconds=started - request.arrival_time,
                encode_seconds=seconds,
                batch_size=len(batch),
            )
            for request, item in zip(batch, embeddings, strict=True)
        ]
