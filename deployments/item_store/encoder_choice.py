"""Chooses where an item is encoded with `encode.placement: auto`: in a replica of Generate, or in the Encode stage.

Each item goes where it costs the least waiting, in seconds of all requests together. In both places the item itself
waits. Beside answers that are being decoded, every one of them waits with it. A stage at rest has to start a replica
first. So light loads are encoded in Generate, and Encode may rest. Heavy ones go to Encode.

All of this is measured, by each shard for itself, in the items that it sends."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from raylens.deployments.ray_internals.running_replicas import has_running_replica
from raylens.deployments.stages.stage_handles import StageHandles
from raylens.deployments.wire.stage_messages import EmbeddingInfo

_KEPT = 0.9
"""The weight of what was known before, when an item brings news."""
_FIRST_START_SECONDS = 5.0
"""How long a start is taken to last before one was seen."""
_DECODING_HALVES_SECONDS = 1.0
"""Answers end without a word to this process: the number that was last heard of halves in this time."""


class EncoderPlace:
    """One deployment that encodes items. `stage` is its name in messages. `has_replica` tells whether it has a replica
    that runs. Use the place on one thread, the event loop's."""

    def __init__(self, stage: str, handle: DeploymentHandle[Any], has_replica: Callable[[], bool]) -> None:
        self.stage = stage
        self.handle = handle
        self.has_replica = has_replica
        self._pending_pixels = 0
        # Sums over the items sent, later ones weighing more.
        self._waited_seconds = 0.0
        self._waited_pixels = 0.0
        self._num_decoding = 0.0
        self._told_at = 0.0
        self._start_seconds = _FIRST_START_SECONDS

    def cost(self, num_pixels: int) -> float:
        """Returns how many seconds requests would wait for one more item here, 0 as long as no item has been here."""
        pixels = self._pending_pixels + max(1, num_pixels)
        waiting = pixels * self._waited_seconds / self._waited_pixels if self._waited_pixels else 0.0
        halvings = (time.monotonic() - self._told_at) / _DECODING_HALVES_SECONDS
        start = 0.0 if self.has_replica() else self._start_seconds
        return start + waiting * (1 + self._num_decoding * math.pow(0.5, halvings))

    @contextmanager
    def call(self, num_pixels: int) -> Iterator[Callable[[EmbeddingInfo], None]]:
        """Counts one item until the block ends, in whatever way. Yields what is to be told the replica's answer."""
        pixels = max(1, num_pixels)
        self._pending_pixels += pixels
        pending_pixels, is_start, sent_at = self._pending_pixels, not self.has_replica(), time.monotonic()

        def answered(info: EmbeddingInfo) -> None:
            self._num_decoding, self._told_at = info.num_decoding, time.monotonic()
            if is_start:
                self._start_seconds = self._told_at - sent_at
                return
            # The item came behind others: all of them together had `pending_pixels`.
            seconds = info.transfer_seconds + info.queue_seconds + info.encode_seconds
            self._waited_seconds = _KEPT * self._waited_seconds + seconds
            self._waited_pixels = _KEPT * self._waited_pixels + pending_pixels

        try:
            yield answered
        finally:
            self._pending_pixels -= pixels


def places_of(stages: StageHandles) -> list[EncoderPlace]:
    """Returns the places where a model's items may be encoded."""
    return [
        EncoderPlace(stage, handle, partial(has_running_replica, handle)) for stage, handle in stages.encoders.items()
    ]


def cheapest(places: Sequence[EncoderPlace], num_pixels: int) -> EncoderPlace:
    """Returns the place where one more item of so many pixels costs the least, the first one of equals."""
    return min(places, key=lambda place: place.cost(num_pixels))
