"""Scales each stage by its own work, not by calls: a 4K picture is 8 times the work of one of 1024 x 1024.

A replica reports how much work it has, in units of its stage, to Ray Serve's controller. There `WorkScaling` turns the
sums over all replicas into a number of replicas, by what one replica should have of each unit. Calls also queue at the
handles when every replica has its `max_ongoing_requests`. The policy takes these to be like the calls in the replicas.

    class Preprocess:
        async def record_autoscaling_stats(self) -> dict[str, float]:
            return self._pending.stats()

    serve.deployment(Preprocess, **scaling(at_least=1, at_most=4, targets={"pixels": 17e6}, down_delay_s=60.0))

The controller gets the class by value, with what it uses of this module, and need not find the module itself."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

CALLS = "calls"
"""Names the number of calls among what a replica reports."""
_REPORT_SECONDS = 0.25
_WINDOW_SECONDS = 1.0
"""Over how long reports are averaged: a burst that is over within it is no reason to start a replica."""


class PendingWork:
    """Counts the calls that a replica has not answered yet, and their work in the unit `unit`. Use it on one thread,
    the event loop's."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._num_calls = 0
        self.amount = 0.0

    @contextmanager
    def call(self, amount: float) -> Iterator[None]:
        """Counts one call of that much work until the block ends, in whatever way."""
        self._num_calls += 1
        self.amount += amount
        try:
            yield
        finally:
            self._num_calls -= 1
            self.amount = self.amount - amount if self._num_calls else 0.0  # of fractions, a rest would stay

    def stats(self) -> dict[str, float]:
        """Returns what a deployment's `record_autoscaling_stats` returns."""
        return {self._unit: self.amount, CALLS: self._num_calls}


class WorkScaling:
    """The scaling policy: so many replicas that each has at most its target of every unit."""

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
    """Returns the work in replicas and that of calls that have reached none, which are taken to have as much on
    average.

    The latter is 0 while no replica has reported a call: a replica that has room gets the queue within the next report.
    """
    return amount * (1 + num_queued / num_calls) if num_calls > 0 else amount


def desired_replicas(share: float, *, has_queue: bool, at_least: int, at_most: int) -> int:
    """Returns how many replicas it takes for each to have its target or less, within the bounds. `share`: all work in
    targets of one replica. A queue needs one, even where nobody has told yet how much work it is."""
    # Bounded here already: Serve's delays start over only when a decision equals what there is.
    return max(at_least, min(at_most, max(math.ceil(share), int(has_queue))))


def scaling(*, at_least: int, at_most: int, targets: Mapping[str, float], down_delay_s: float) -> dict[str, Any]:
    """Returns the options of a deployment that has between `at_least` and `at_most` replicas.

    A replica more is started some two seconds after it is needed; one fewer has to do for `down_delay_s` before one
    stops. Raises ValueError unless each target is a number above 0."""
    # Checked here: an error in the policy itself would show only in the controller's log.
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
