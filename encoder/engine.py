"""The encoder engine: call `add_request`, then `step` until `has_unfinished` is false. Synchronous, one thread."""

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from cpu_kernels.threads import set_num_threads, usable_cores
from encoder.accelerator import make_graphs, make_staging
from encoder.activation_memory import peak_activation_bytes
from encoder.config import EncoderConfig
from encoder.loader import load_vision_half
from encoder.models.family import VisionModality
from encoder.pipeline_half import PipelineHalf, load_pipeline_half
from encoder.scheduler import EncoderScheduler
from encoder.schema import EncodeOutput, EncodeRequest
from encoder.staging import PendingEmbeddings
from preprocess.schema import InvalidRequestError, ItemTensors

_SHORT_BATCH_S = 0.01
"""On the CPU, a batch that takes less goes on one thread: others would have hardly woken up."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch that has been launched, with each item's pending embeddings or the error that ended the item. `started`
    is in seconds of `time.perf_counter`."""

    batch: Sequence[EncodeRequest]
    results: Sequence[PendingEmbeddings | Exception]
    started: float


class EncoderEngine:
    """Batches the waiting items and runs the vision half over each batch."""

    def __init__(self, config: EncoderConfig) -> None:
        self._device = torch.device(config.tower.device)
        self._model: Any
        self._pipeline: PipelineHalf | None = None
        if config.pipeline is None:
            self._model, self._family = load_vision_half(config)
        else:
            self._pipeline, self._family = load_pipeline_half(config, config.pipeline)
            self._model = self._pipeline
        self._num_threads = config.num_threads or usable_cores()
        self._seconds_per_patch = math.inf
        self._scheduler = EncoderScheduler(config.batch_patches)
        self.max_item_patches: int | None = None
        self._staging = make_staging(config)
        self._graphs = make_graphs(self._model, self._family, config)
        self._launched: deque[_Launched] = deque()

    def bound_activations(self, modality: str, tensors: ItemTensors, max_bytes: int) -> None:
        """Encodes one item to measure the memory of a patch, and bounds batches so that activations stay below
        `max_bytes`.

        Sets `max_item_patches`, the most patches that an item may have from then on. CUDA graphs are recorded until
        they hold as much again."""
        request = self._request("", modality, tensors)
        with (
            nullcontext() if self._graphs is None else self._graphs.paused(),
            nullcontext() if self._pipeline is None else self._pipeline.measured(),
        ):
            num_bytes = peak_activation_bytes(lambda: [get() for get in self._encode([request])], self._device)
        if self._graphs is not None:
            self._graphs.max_bytes = min(self._graphs.max_bytes, max_bytes)
        self.max_item_patches = max_bytes * request.num_patches // num_bytes
        self._scheduler.max_batch_patches = max(1, min(self._scheduler.max_batch_patches, self.max_item_patches))

    def num_patches(self, modality: str, tensors: ItemTensors) -> int:
        """Returns the number of patches of an item, which is the measure of its cost."""
        return self._request("", modality, tensors).num_patches

    def add_request(self, request_id: str, modality: str, tensors: ItemTensors) -> None:
        """Queues one item in the form in which Preprocess makes it. A later `step` returns its embeddings.

        Raises InvalidRequestError for a modality that the model does not take, and for an item of more patches than
        `max_item_patches`.
        """
        request = self._request(request_id, modality, tensors)
        if self.max_item_patches is not None and request.num_patches > self.max_item_patches:
            raise InvalidRequestError(
                f"the {modality} has {request.num_patches} patches, more than the {self.max_item_patches} that this"
                " server has the memory to encode",
                field="media",
                code="item_too_large",
            )
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Removes an item that still waits. Does nothing for an item that is being encoded, done or unknown."""
        self._scheduler.abort(request_id)

    def has_unfinished(self) -> bool:
        return len(self._scheduler) > 0 or len(self._launched) > 0

    @property
    def has_hung(self) -> bool:
        """Returns whether a call of the pipeline was given up, so that the process should be replaced."""
        return self._pipeline is not None and self._pipeline.has_hung

    @property
    def is_idle(self) -> bool:
        """Returns whether a step would do nothing until the next request comes."""
        return not self.has_unfinished()

    def step(self) -> list[EncodeOutput]:
        """Encodes the next batch. Each of its items gets exactly one output; the output of an item that failed carries
        the error.

        With both parts on one GPU a step launches a batch while the batch before it runs, and returns the outputs of
        that earlier batch. The first step then returns none.
        """
        if batch := self._scheduler.schedule():
            self._launched.append(self._launch(batch))
            if len(self._launched) <= self._staging.look_ahead:
                return []
        return self._finish(self._launched.popleft()) if self._launched else []

    def _launch(self, batch: list[EncodeRequest]) -> _Launched:
        started = time.perf_counter()
        is_short = self._seconds_per_patch * _num_patches(batch) < _SHORT_BATCH_S
        set_num_threads(1 if is_short else self._num_threads)
        try:
            results: Sequence[PendingEmbeddings | Exception] = self._encode(batch)
        except torch.AcceleratorError:
            raise  # the device itself has failed: every later step would, too
        except Exception as error:
            # One bad item must not fail the others of its batch: each is encoded alone.
            results = [error] if len(batch) == 1 else [self._encode_alone(request) for request in batch]
        return _Launched(batch, results, started)

    def _finish(self, launched: _Launched) -> list[EncodeOutput]:
        """Waits for the batch's embeddings and returns an output for each item."""
        embeddings = [None if isinstance(result, Exception) else result() for result in launched.results]
        seconds = time.perf_counter() - launched.started
        self._seconds_per_patch = seconds / max(1, _num_patches(launched.batch))
        return [
            EncodeOutput(
                request_id=request.request_id,
                embeddings=own,
                error=result if isinstance(result, Exception) else None,
                queue_seconds=launched.started - request.arrival_time,
                encode_seconds=seconds,
                batch_size=len(launched.batch),
            )
            for request, own, result in zip(launched.batch, embeddings, launched.results, strict=True)
        ]

    def _request(self, request_id: str, modality: str, tensors: ItemTensors) -> EncodeRequest:
        rules = self._rules(modality)
        return EncodeRequest(
            request_id,
            modality,
            tensors,
            num_patches=rules.num_patches(self._model.config, tensors),
            batch_key=(modality, rules.batch_key(tensors)),
            arrival_time=time.perf_counter(),
        )

    def _rules(self, modality: str) -> VisionModality:
        if modality not in self._family.modalities:
            taken = ", ".join(self._family.modalities)
            raise InvalidRequestError(
                f"this model's encoder takes {taken}, not {modality}", field="media", code="unsupported_modality"
            )
        return self._family.modalities[modality]

    def _encode_alone(self, request: EncodeRequest) -> PendingEmbeddings | Exception:
        try:
            return self._encode([request])[0]
        except torch.AcceleratorError:
            raise
        except Exception as error:
            return error

    @torch.inference_mode()
    def _encode(self, batch: list[EncodeRequest]) -> list[PendingEmbeddings]:
        rules = self._rules(batch[0].modality)
        items = [request.tensors for request in batch]
        return self._staging.run(lambda moved: rules.encode(self._model, moved), items, rules.on_host)


def _num_patches(batch: Sequence[EncodeRequest]) -> int:
    return sum(request.num_patches for request in batch)
