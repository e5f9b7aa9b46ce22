"""The encoder engine: call `add_request`, then `step` until `has_unfinished` is false. Synchronous, one thread."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raylens.cpu_kernels.threads import ThreadBackoff, set_num_threads, usable_cores
from raylens.encoder.activation_memory import peak_activation_bytes
from raylens.encoder.config import EncoderConfig
from raylens.encoder.loader import load_vision_half
from raylens.encoder.models.family import VisionModality
from raylens.encoder.plugin_half import PluginHalf, load_plugin_half
from raylens.encoder.scheduler import EncoderScheduler
from raylens.encoder.schema import EncodeOutput, EncodeRequest, ScheduledSegment
from raylens.encoder.segments import divide, join
from raylens.encoder.staging import PendingEmbeddings, make_staging
from raylens.encoder.tower_graphs import make_graphs
from raylens.modeling.attention_backends import turn_off_cudnn_attention
from raylens.preprocess.schema import InvalidRequestError, ItemTensors

_SHORT_BATCH_S = 0.01
"""On the CPU, a shorter batch runs on one thread, because waking others would take longer."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launched batch, with each segment's pending embeddings or the error that ended its item. `started`: in seconds
    of `time.perf_counter`."""

    batch: Sequence[ScheduledSegment]
    results: Sequence[PendingEmbeddings | Exception]
    started: float


class EncoderEngine:
    """Batches the waiting items and runs the vision half over each batch.

    Items larger than a batch are divided into segments, if their family permits it. Other items are encoded between the
    segments."""

    def __init__(self, config: EncoderConfig) -> None:
        turn_off_cudnn_attention()
        self._device = torch.device(config.tower.device)
        self._model: Any
        self._plugin: PluginHalf | None = None
        if config.vision_plugin is None:
            self._model, self._family = load_vision_half(config)
        else:
            self._plugin, self._family = load_plugin_half(config, config.vision_plugin)
            self._model = self._plugin
        self._threads = ThreadBackoff(config.num_threads or usable_cores())
        self._seconds_per_patch = math.inf
        self._scheduler = EncoderScheduler(config.batch_patches)
        self.max_segment_patches: dict[str, int] = {}
        """By measured modality. Videos have the bound of pictures, whose patches they have."""
        self._staging = make_staging(config)
        self._graphs = make_graphs(self._model, self._family, config)
        self._launched: deque[_Launched] = deque()

    def num_batches(self, modality: str, tensors: ItemTensors) -> float:
        """Returns an item's work in full batches. Raises InvalidRequestError for an unsupported modality."""
        return self._rules(modality).num_patches(self._model.config, tensors) / self._scheduler.max_batch_patches

    def bound_activations(self, modality: str, tensors: ItemTensors, max_bytes: int) -> None:
        """Encodes one item to measure the memory of a patch, and bounds batches so that activations stay below
        `max_bytes`.

        Sets the modality's `max_segment_patches`, the most patches of a segment from then on. CUDA graphs may hold
        another `max_bytes`."""
        num_patches = self._rules(modality).num_patches(self._model.config, tensors)
        self._mark_measured(True)
        num_bytes = peak_activation_bytes(lambda: [get() for get in self._encode(modality, [tensors])], self._device)
        self._mark_measured(False)
        if self._graphs is not None:
            self._graphs.max_bytes = min(self._graphs.max_bytes, max_bytes)
        most = self.max_segment_patches[modality] = max_bytes * num_patches // num_bytes
        self._scheduler.max_batch_patches = max(1, min(self._scheduler.max_batch_patches, most))

    def _mark_measured(self, is_measured: bool) -> None:
        for part in (self._graphs, self._plugin):
            if part is not None:
                part.is_measured = is_measured

    def largest_segment(self, modality: str, tensors: ItemTensors) -> int:
        """Returns the most patches of an item that must be encoded together: all, if its family does not divide it."""
        return _largest_segment(self._request("", modality, tensors))

    def add_request(
        self, request_id: str, modality: str, tensors: ItemTensors, *, arrival: float | None = None
    ) -> None:
        """Queues one item in the form of Preprocess. A later `step` returns its embeddings. `arrival`: the start of its
        wait, in seconds of `time.perf_counter`; None: now.

        Raises InvalidRequestError for an unsupported modality, and for an item with a segment of more patches than
        `max_segment_patches`."""
        request = self._request(request_id, modality, tensors, arrival)
        num_patches = _largest_segment(request)
        most = self.max_segment_patches.get("image" if modality == "video" else modality)
        if most is not None and num_patches > most:
            raise InvalidRequestError(
                f"the {modality} has {num_patches} patches that must be encoded together, more than the"
                f" {most} that this server has the memory for",
                field="media",
                code="item_too_large",
            )
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Removes an item with waiting segments; it gets no output. Does nothing for an unknown item, or one without
        waiting segments."""
        request = self._scheduler.abort(request_id)
        if request is not None:
            request.is_over = True

    def has_unfinished(self) -> bool:
        return len(self._scheduler) > 0 or len(self._launched) > 0

    @property
    def waiting(self) -> tuple[int, int]:
        """Returns the number of items that wait for a batch, and of their patches. Thread-safe."""
        return len(self._scheduler), self._scheduler.num_waiting_patches

    @property
    def has_hung(self) -> bool:
        """Returns whether a call of the plug-in was given up, so that the process should be replaced."""
        return self._plugin is not None and self._plugin.has_hung

    @property
    def is_idle(self) -> bool:
        """Returns whether steps have nothing to do until the next request."""
        return not self.has_unfinished()

    def step(self) -> list[EncodeOutput]:
        """Encodes the next batch. Each item gets exactly one output: with its last segment, or, with the error, at the
        segment that failed.

        With both parts on one GPU a step launches a batch while the previous one runs, and returns the previous batch's
        outputs. The first step then returns none."""
        if batch := self._scheduler.schedule():
            self._launched.append(self._launch(batch))
            if len(self._launched) <= self._staging.look_ahead:
                return []
        return self._finish(self._launched.popleft()) if self._launched else []

    def _launch(self, batch: list[ScheduledSegment]) -> _Launched:
        started = time.perf_counter()
        is_short = self._seconds_per_patch * _num_patches(batch) < _SHORT_BATCH_S
        number = self._threads.next_number()
        set_num_threads(1 if is_short else number)
        return _Launched(batch, self._results(batch), started)

    def _results(self, batch: Sequence[ScheduledSegment]) -> Sequence[PendingEmbeddings | Exception]:
        try:
            return self._encode(batch[0].request.modality, [segment.tensors for segment in batch])
        except torch.AcceleratorError:
            raise  # the device has failed, and every later step would fail, too
        except Exception as error:
            if len(batch) == 1:
                return [error]
            # Encode each item alone, so that a bad item does not fail the others of its batch.
            return [result for segment in batch for result in self._results([segment])]

    def _finish(self, launched: _Launched) -> list[EncodeOutput]:
        """Waits for the batch's embeddings and returns an output for each finished or failed item."""
        embeddings = [result if isinstance(result, Exception) else result() for result in launched.results]
        finished = time.perf_counter()
        seconds, num_patches = finished - launched.started, max(1, _num_patches(launched.batch))
        self._seconds_per_patch = seconds / num_patches
        if seconds >= _SHORT_BATCH_S:
            self._threads.note(seconds)
        outputs = []
        for segment, own in zip(launched.batch, embeddings, strict=True):
            request = segment.request
            if request.is_over:
                continue
            # Overlapping batches may each have a segment of the item.
            request.encode_seconds += finished - max(launched.started, request.encoded_until)
            request.encoded_until = finished
            if isinstance(own, Exception):
                self.abort(request.request_id)
                request.is_over = True
            else:
                request.embeddings.append(own)
            if segment.is_last or request.is_over:
                outputs.append(self._output(request, own, len(launched.batch)))
        return outputs

    @torch.inference_mode()
    def _output(self, request: EncodeRequest, last: torch.Tensor | Exception, batch_size: int) -> EncodeOutput:
        """`last`: the result of the item's last segment."""
        error = last if isinstance(last, Exception) else None
        return EncodeOutput(
            request_id=request.request_id,
            embeddings=join(self._rules(request.modality), request.embeddings) if error is None else None,
            error=error,
            queue_seconds=request.encoded_until - request.arrival_time - request.encode_seconds,
            encode_seconds=request.encode_seconds,
            batch_size=batch_size,
        )

    def _request(
        self, request_id: str, modality: str, tensors: ItemTensors, arrival: float | None = None
    ) -> EncodeRequest:
        rules = self._rules(modality)
        return EncodeRequest(
            request_id,
            modality,
            divide(rules, self._model.config, tensors, self._scheduler.max_batch_patches),
            batch_key=(modality, rules.batch_key(tensors)),
            arrival_time=time.perf_counter() if arrival is None else arrival,
        )

    def _rules(self, modality: str) -> VisionModality:
        if modality not in self._family.modalities:
            taken = ", ".join(self._family.modalities)
            raise InvalidRequestError(
                f"this model's encoder takes {taken}, not {modality}", field="media", code="unsupported_modality"
            )
        return self._family.modalities[modality]

    @torch.inference_mode()
    def _encode(self, modality: str, items: list[ItemTensors]) -> list[PendingEmbeddings]:
        rules = self._rules(modality)
        return self._staging.run(lambda moved: rules.encode(self._model, moved), items, rules.on_host)


def _num_patches(batch: Sequence[ScheduledSegment]) -> int:
    return sum(segment.num_patches for segment in batch)


def _largest_segment(request: EncodeRequest) -> int:
    return max(segment.num_patches for segment in request.segments)
