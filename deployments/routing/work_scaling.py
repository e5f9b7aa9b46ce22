"""Scales each stage by its work instead of its calls: a 4K picture is 8 times the work of one of 1024 x 1024.

A replica reports its work, in its stage's units, to Ray Serve's controller. There `WorkScaling` divides the sums over
all replicas by the target per replica. Calls also queue at the handles when every replica has its
`max_ongoing_requests`; the policy assumes the same mean work for them.

    class Preprocess:
        async def record_autoscaling_stats(self) -> dict[str, float]:
            return self._pending.stats()

    serve.deployment(Preprocess, **scaling(at_least=1, at_most=4, targets={"pixels": 17e6}, down_delay_s=60.0))

The controller gets the class by value, together with the parts of this module that it uses, so it need not import this
module."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

CALLS = "calls"
"""Key of the number of calls in a replica's report."""
_REPORT_SECONDS = 0.5
_WINDOW_SECONDS = 1.0
"""Averaging window of reports: a shorter burst starts no replica."""


class PendingWork:
    """Counts a replica's unanswered calls, and their work in `unit`. Use it on the event loop's thread only."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._num_calls = 0
        self.amount = 0.0

    @contextmanager
    def call(self, amount: float) -> Iterator[None]:
        """Counts one call of that much work until the block ends."""
        self._num_calls += 1
        self.amount += amount
        try:
            yield
        finally:
            self._num_calls -= 1
            self.amount = self.amount - amount if self._num_calls else 0.0  # resets accumulated rounding errors

    def stats(self) -> dict[str, float]:
        """Returns a deployment's `record_autoscaling_stats`."""
        return {self._unit: self.amount, CALLS: self._num_calls}


class WorkScaling:
    """The scaling policy: enough replicas that each has at most its target of every unit."""

    def __init__(self, targets: Mapping[str, float]) -> None:
        self._targets = targets

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        queued = context.total_queued_requests or 0.0
        calls = sum(metrics.get(CALLS, {}).values())
        shares = [
            with_queued(sum(metrics.get(unit, {}).values()), calls, queued) / target
            for unit, target in self._targets.items()
        ]
        desired = desired_replicas(
            max(shares),
            has_queue=queued > 0,
            at_least=context.capacity_adjusted_min_replicas,
            at_most=context.capacity_adjusted_max_replicas,
        )
        return desired, {}


def with_queued(amount: float, num_calls: float, num_queued: float) -> float:
    """Returns the work of calls in replicas plus that of queued calls, which are assumed to have the same mean.

    Queued work counts as 0 while no replica has reported a call: a replica with room gets the queue before its next
    report."""
    return amount * (1 + num_queued / num_calls) if num_calls > 0 else amount


def desired_replicas(share: float, *, has_queue: bool, at_least: int, at_most: int) -> int:
    """Returns the number of replicas, within the bounds, at which none exceeds its target. `share`: all work in targets
    of one replica. A queue of unknown work needs one replica."""
    # Bounded here: Serve's delays restart only when a decision equals the current number.
    return max(at_least, min(at_most, max(math.ceil(share), int(has_queue))))


def scaling(*, at_least: int, at_most: int, targets: Mapping[str, float], down_delay_s: float) -> dict[str, Any]:
    """Returns the options of a deployment with `at_least` to `at_most` replicas.

    Scales up after about 2 s of need; scales down after `down_delay_s` of excess. Raises ValueError unless each target
    is a positive number."""
    # Checked here: an error in the policy would appear only in the controller's log.
    for unit, target in targets.items():
        if not 0 < target < math.inf:
            raise ValueError(f"the target of {unit} is {target}, but must be a number over 0")
    if at_least == at_most:
        return {"num_replicas": at_least}
    policy = AutoscalingPolicy(policy_function=WorkScaling, policy_kwargs={"targets": dict(targets)})
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=at_least,
            max_replicas=at_most,
            upscale_delay_s=0.0,
            downscale_delay_s=down_delay_s,
            metrics_interval_s=_REPORT_SECONDS,
            look_back_period_s=_WINDOW_SECONDS,
            policy=policy,
        )
    }
