"""Replicas by the work that waits: the policy's arithmetic, and the preprocess stage as it is served on a real Ray."""

import asyncio
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from raylens.deployments.app import build_app
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.app_lifetime import end_app
from raylens.deployments.request_context import NO_REQUEST
from raylens.deployments.routing.work_scaling import (
    CALLS,
    PendingWork,
    WorkScaling,
    desired_replicas,
    scaling,
    with_queued,
)
from raylens.deployments.stages.preprocess_stage import CALL_PIXELS, PIXELS
from raylens.deployments.wire.stage_messages import ItemJob
from raylens.preprocess.pixel_count import count_pixels
from raylens.preprocess.schema import ChatPrompt
from tests.pictures import disc, encoded

TIMEOUT = 30
APP = "preprocess"
PIXELS_4K = 3840 * 2160
HUGE_SIDE = 5000  # pixels
IN_FLIGHT = 12  # below `max_ongoing_requests`: no call queues, so none hides what it weighs

shares = st.floats(0, 1e6)
TOKENS = "tokens"


# The policy


@given(shares, st.booleans(), st.integers(0, 4), st.integers(4, 100))
def test_each_replica_has_the_target_or_less(share: float, has_queue: bool, at_least: int, at_most: int) -> None:
    desired = desired_replicas(share, has_queue=has_queue, at_least=at_least, at_most=at_most)
    assert at_least <= desired <= at_most
    assert desired == at_most or share <= desired
    assert desired <= max(at_least, int(has_queue)) or share > desired - 1
    assert desired > 0 or not has_queue


@given(shares, shares, st.booleans())
def test_more_work_never_means_fewer_replicas(fewer: float, more: float, has_queue: bool) -> None:
    desired = [desired_replicas(share, has_queue=has_queue, at_least=0, at_most=50) for share in sorted((fewer, more))]
    assert desired == sorted(desired)


def test_what_queues_is_like_what_is_in_replicas() -> None:
    assert with_queued(200.0, num_calls=10, num_queued=30) == 800.0
    assert with_queued(0.0, num_calls=0, num_queued=30) == 0.0


def context(queued: float = 0.0, bounds: tuple[int, int] = (1, 10), **replicas: tuple[float, ...]) -> Any:
    """What the policy reads of Serve's context; `replicas` have (megapixels, calls), and some also tokens."""
    metrics = {
        PIXELS: {name: work[0] * 1e6 for name, work in replicas.items()},
        CALLS: {name: work[1] for name, work in replicas.items()},
        TOKENS: {name: work[2] for name, work in replicas.items() if len(work) > 2},
    }
    return SimpleNamespace(
        aggregated_metrics=metrics if replicas else {},
        total_queued_requests=queued,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
    )


@pytest.mark.parametrize(
    ("given_context", "desired"),
    [
        (context(), 1),
        (context(queued=100), 1),  # what they weigh is not known yet
        (context(bounds=(3, 10)), 3),
        (context(a=(17, 2)), 1),
        (context(a=(17.1, 3)), 2),
        (context(a=(17, 2), b=(17, 2), c=(1, 1)), 3),
        (context(a=(16, 16), queued=16), 2),
        (context(a=(1.6, 16), queued=100), 1),
        (context(a=(1700, 16), queued=100), 10),
        (context(a=(0, 1, 10), b=(0, 1, 11)), 3),  # by the unit that needs the most
        (context(a=(50, 1, 10)), 3),
        (context(bounds=(0, 10)), 0),
        (context(bounds=(0, 10), queued=1), 1),  # the first call behind a rest
        (context(bounds=(0, 10), a=(1, 1)), 1),
    ],
)
def test_the_policy_sums_over_replicas_and_queues(given_context: Any, desired: int) -> None:
    assert WorkScaling({PIXELS: 17e6, TOKENS: 10.0})(given_context) == (desired, {})


@pytest.mark.parametrize(("field", "desired"), [("aggregated_metrics", 1), ("total_queued_requests", 2)])
def test_what_serve_does_not_know_counts_as_nothing(field: str, desired: int) -> None:
    unknown = context(queued=100, a=(34, 2))
    setattr(unknown, field, None)
    assert WorkScaling({PIXELS: 17e6})(unknown) == (desired, {})


@pytest.mark.parametrize(("load", "expected"), [(1.0, [1, 1, 2]), (0.5, [1, 2, 3])])
def test_a_replica_has_room_for_two_4k_pictures_times_the_target_load(load: float, expected: list[int]) -> None:
    app: Any = build_app(AppConfig.model_validate({"scaling": {"target_load": load}}))
    stage = app._bound_deployment.init_args[1][""].preprocess._bound_deployment
    policy = WorkScaling(**stage._deployment_config.autoscaling_config.policy.policy_kwargs)
    works = [context(a=(number * (PIXELS_4K + CALL_PIXELS) / 1e6, number)) for number in range(1, 4)]
    assert [policy(work)[0] for work in works] == expected


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_target_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match="the target of tokens is"):
        scaling(at_least=1, at_most=2, targets={TOKENS: target}, down_delay_s=1.0)


def test_a_stage_of_a_fixed_size_is_not_scaled() -> None:
    assert scaling(at_least=2, at_most=2, targets={TOKENS: 1.0}, down_delay_s=1.0) == {"num_replicas": 2}


# What is pending in a replica


def test_a_call_counts_until_it_ends_in_whichever_way() -> None:
    async def main() -> None:
        pending = PendingWork(TOKENS)
        ends = [asyncio.Event() for _ in range(3)]

        async def work(end: asyncio.Event, amount: float, error: Exception | None = None) -> None:
            with pending.call(amount):
                await end.wait()
                if error is not None:
                    raise error

        tasks = [asyncio.create_task(work(ends[0], 0.1)), asyncio.create_task(work(ends[1], 0.2, ValueError()))]
        tasks.append(asyncio.create_task(work(ends[2], 0.3)))
        await asyncio.sleep(0)
        seen = [pending.stats()]
        for stop in (ends[0].set, ends[1].set, tasks[2].cancel):
            stop()
            await asyncio.sleep(0.01)
            seen.append(pending.stats())
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [stats[CALLS] for stats in seen] == [3, 2, 1, 0]
        assert [stats[TOKENS] for stats in seen] == pytest.approx([0.6, 0.5, 0.3, 0.0])
        assert seen[-1][TOKENS] == 0.0

    asyncio.run(main())


# The stage on a real Ray Serve


def image_job(content: bytes) -> ItemJob:
    return ItemJob("image", content, count_pixels(content), num_in_prompt=1, options={})


TINY = image_job(encoded(disc("red", (64, 64))))
BROKEN = image_job(b"not a picture")
# Noise, a part at a time: it takes some 0.2 s to decode.
SLOW_4K = image_job(encoded(Image.effect_noise((3840, 2160), 64).convert("RGB"), "JPEG", quality=95, progressive=True))
HUGE = image_job(encoded(Image.new("RGB", (HUGE_SIDE, HUGE_SIDE), "red")))
PROMPT = ChatPrompt([{"role": "user", "content": [{"type": "text", "text": "What colour is the circle?"}]}])


@pytest.fixture(scope="module")
def preprocess(shapes: str, ray_port: int) -> Iterator[DeploymentHandle[Any]]:
    """The stage as the application has it, without the others."""
    stage = build_app(AppConfig(model=shapes))._bound_deployment.init_args[1][""].preprocess
    yield serve.run(stage, name=APP, route_prefix=None)
    end_app(APP)


def process(handle: DeploymentHandle[Any], job: ItemJob) -> None:
    handle.process_item.remote(job).result(timeout_s=TIMEOUT)


def render(handle: DeploymentHandle[Any]) -> None:
    handle.render.remote(PROMPT, [], None, NO_REQUEST, []).result(timeout_s=TIMEOUT)


@contextmanager
def in_flight(calls: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Makes each of the calls over and over, in a thread each; raises what one of them has raised."""
    assert len(calls) == IN_FLIGHT
    is_over = threading.Event()

    def send_on(call: Callable[[], None]) -> None:
        while not is_over.is_set():
            call()

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        senders = [threads.submit(send_on, call) for call in calls]
        try:
            yield
        finally:
            is_over.set()
        for sender in senders:
            sender.result(TIMEOUT)


def num_replicas() -> int:
    """Replicas that run or start."""
    application = serve.status().applications[APP]
    assert application.status in (ApplicationStatus.RUNNING, ApplicationStatus.DEPLOYING)
    return sum(application.deployments["Preprocess"].replica_states.values())


def pending(handle: DeploymentHandle[Any]) -> dict[str, float]:
    stats: dict[str, float] = handle.record_autoscaling_stats.remote().result(timeout_s=TIMEOUT)
    return stats


@pytest.mark.slow
def test_many_small_calls_leave_one_replica(preprocess: DeploymentHandle[Any]) -> None:
    """In the time in which as many large pictures, or Serve's own policy, start another one.

    They wait behind a picture that leaves a replica half its target. No large picture has been sent before: on a busy
    machine it waits for long enough to start one.
    """
    jobs = [SLOW_4K] + [TINY] * (IN_FLIGHT - 4)
    with in_flight([partial(process, preprocess, job) for job in jobs] + [partial(render, preprocess)] * 3):
        waiting = []
        deadline = time.monotonic() + 9.0
        while time.monotonic() < deadline:
            assert num_replicas() == 1
            waiting.append(pending(preprocess)[CALLS])
            time.sleep(0.2)
    assert statistics.mean(waiting) > IN_FLIGHT / 2


def test_items_count_from_their_arrival_until_they_fail_or_are_cancelled(preprocess: DeploymentHandle[Any]) -> None:
    with pytest.raises(RayTaskError):
        process(preprocess, BROKEN)
    assert pending(preprocess) == {PIXELS: 0, CALLS: 0}
    responses = [preprocess.process_item.remote(HUGE) for _ in range(10)]
    deadline = time.monotonic() + TIMEOUT
    while (stats := pending(preprocess))[CALLS] < 6:
        assert time.monotonic() < deadline
    assert stats[PIXELS] == stats[CALLS] * (HUGE_SIDE**2 + CALL_PIXELS)
    started = time.monotonic()
    for response in responses:
        response.cancel()
    while pending(preprocess)[CALLS] > 0:
        assert time.monotonic() < started + TIMEOUT
    assert time.monotonic() - started < 1.0  # the item in work, at most, is waited for


@pytest.mark.slow
def test_as_many_large_pictures_start_another_replica(preprocess: DeploymentHandle[Any]) -> None:
    with in_flight([partial(process, preprocess, HUGE)] * IN_FLIGHT):
        deadline = time.monotonic() + TIMEOUT
        while num_replicas() < 2:
            assert time.monotonic() < deadline
            time.sleep(0.5)
