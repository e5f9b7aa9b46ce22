"""Chooses the encoder of an item with `encode.placement: auto`: a Generate replica or the Encode stage.

Each item goes to the place with the least added waiting, in seconds summed over all requests. The item itself waits in
both places. In Generate, all decoding answers wait with it. A stage at rest must start a replica first. So light loads
are encoded in Generate, and Encode may rest. Heavy loads go to Encode.

Each shard measures all of this by its own items."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.serve.handle import DeploymentHandle

from raylens.deployments.wire.stage_messages import EmbeddingInfo

_KEPT = 0.9
"""The weight of earlier measurements in an update."""
_FIRST_START_SECONDS = 5.0
"""Assumed duration of a replica's start until one is measured."""
_DECODING_HALVES_SECONDS = 1.0
"""This process is not told when answers end, so the last known count decays with this half-life."""


class EncoderPlace:
    """One deployment that encodes items. `stage`: its name in messages. `has_replica` returns whether a replica is
    running. Use it on the event loop's thread only."""

    def __init__(self, stage: str, handle: DeploymentHandle[Any], has_replica: Callable[[], bool]) -> None:
        self.stage = stage
        self.encode = handle.encode
        self.has_replica = has_replica
        self._pending_pixels = 0
        # Exponentially decaying sums over the sent items.
        self._waited_seconds = 0.0
        self._waited_pixels = 0.0
        self._num_decoding = 0.0
        self._told_at = 0.0
        self._start_seconds = _FIRST_START_SECONDS

    def cost(self, num_pixels: int) -> float:
        """Returns the seconds that requests would wait for one more item here; 0 before the first item."""
        pixels = self._pending_pixels + max(1, num_pixels)
        waiting = pixels * self._waited_seconds / self._waited_pixels if self._waited_pixels else 0.0
        halvings = (time.monotonic() - self._told_at) / _DECODING_HALVES_SECONDS
        start = 0.0 if self.has_replica() else self._start_seconds
        return start + waiting * (1 + self._num_decoding * math.pow(0.5, halvings))

    @contextmanager
    def call(self, num_pixels: int) -> Iterator[Callable[[EmbeddingInfo], None]]:
        """Counts one item until the block ends. Yields a callback for the replica's answer."""
        pixels = max(1, num_pixels)
        self._pending_pixels += pixels
        pending_pixels, is_start, sent_at = self._pending_pixels, not self.has_replica(), time.monotonic()

        def answered(info: EmbeddingInfo) -> None:
            self._num_decoding, self._told_at = info.num_decoding, time.monotonic()
            if is_start:
                self._start_seconds = self._told_at - sent_at
                return
            # The item queued behind others; together they had `pending_pixels`.
            seconds = info.transfer_seconds + info.queue_seconds + info.encode_seconds
            self._waited_seconds = _KEPT * self._waited_seconds + seconds
            self._waited_pixels = _KEPT * self._waited_pixels + pending_pixels

        try:
            yield answered
        finally:
            self._pending_pixels -= pixels


def cheapest(places: Sequence[EncoderPlace], num_pixels: int) -> EncoderPlace:
    """Returns the place with the lowest cost for one more item of `num_pixels`, the first of equals."""
    return min(places, key=lambda place: place.cost(num_pixels))
