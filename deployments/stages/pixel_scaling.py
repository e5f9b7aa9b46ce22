"""Scales replicas by the pixels that wait, not by calls: a 4K picture is 8 times the work of one of 1024 x 1024.

A replica counts the calls that it has not answered yet (`PendingWork`) and reports the sum to Ray Serve's controller.
There `PixelScaling` turns the sum over all replicas into a number of replicas. Calls also queue at the handles when
every replica has its `max_ongoing_requests`. The policy takes these to be like the calls in the replicas.

    class Preprocess:
        async def record_autoscaling_stats(self) -> dict[str, float]:
            return self._pending.stats()

    AutoscalingConfig(..., policy=pixel_scaling(target_megapixels=17.0))

The controller gets the class by value, with what it uses of this module, and need not find the module itself."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.serve.config import AutoscalingContext, AutoscalingPolicy

CALL_PIXELS = 100_000
"""The weight of every call, whatever it brings. The smallest picture takes 0.7 ms, a 4K JPEG 43 ms, some 6 ns a pixel.
Beside a picture this weight is nothing, but thousands of waiting calls are work too."""

PENDING_PIXELS = "pending_pixels"
PENDING_CALLS = "pending_calls"


class PendingWork:
    """Counts the calls that a replica has not answered yet. Use it on one thread, the event loop's."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_pixels = 0

    @contextmanager
    def call(self, num_pixels: int = 0) -> Iterator[None]:
        """Counts one call with media of `num_pixels` until the block ends, in whatever way."""
        weight = CALL_PIXELS + num_pixels
        self._num_calls += 1
        self._num_pixels += weight
        try:
            yield
        finally:
            self._num_calls -= 1
            self._num_pixels -= weight

    @property
    def num_pixels(self) -> int:
        return self._num_pixels

    def stats(self) -> dict[str, float]:
        """Returns what a deployment's `record_autoscaling_stats` returns."""
        return {PENDING_PIXELS: self._num_pixels, PENDING_CALLS: self._num_calls}


class PixelScaling:
    """The scaling policy: so many replicas that each has at most `target_megapixels` (10^6 pixels) pending."""

    def __init__(self, target_megapixels: float) -> None:
        self._target_pixels = target_megapixels * 1e6

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        pixels = sum(metrics.get(PENDING_PIXELS, {}).values())
        calls = sum(metrics.get(PENDING_CALLS, {}).values())
        pixels += queued_pixels(context.total_queued_requests or 0.0, pixels, calls)
        desired = desired_replicas(
            pixels,
            self._target_pixels,
            at_least=context.capacity_adjusted_min_replicas,
            at_most=context.capacity_adjusted_max_replicas,
        )
        return desired, {}


def queued_pixels(num_queued: float, pending_pixels: float, pending_calls: float) -> float:
    """Returns the pixels of the calls that have not reached a replica, taken to have as many on average as the calls in
    replicas.

    The result is 0 while no replica has reported a call: a replica that has room gets the queue within the next
    report.
    """
    return num_queued * pending_pixels / pending_calls if pending_calls > 0 else 0.0


def desired_replicas(pending_pixels: float, target_pixels: float, *, at_least: int, at_most: int) -> int:
    """Returns how many replicas it takes for each to have `target_pixels` or less, within the bounds."""
    # Bounded here already: Serve's delays start over only when a decision equals what there is.
    return max(at_least, min(at_most, math.ceil(pending_pixels / target_pixels)))


def pixel_scaling(target_megapixels: float) -> AutoscalingPolicy:
    """Returns the `policy` of an AutoscalingConfig. Raises ValueError unless the target is above 0."""
    # Checked here: an error in the policy itself would show only in the controller's log.
    if not 0 < target_megapixels < math.inf:
        raise ValueError(f"target_megapixels is {target_megapixels}, but must be a number over 0")
    return AutoscalingPolicy(policy_function=PixelScaling, policy_kwargs={"target_megapixels": target_megapixels})
