"""Replicas by the pixels that wait: the policy's arithmetic, and the preprocess stage as it is served on a real Ray."""

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

from deployments.app import build_app
from deployments.config import AppConfig
from deployments.ray_session import ray_session
from deployments.stages.pixel_scaling import (
    CALL_PIXELS,
    PENDING_CALLS,
    PENDING_PIXELS,
    PendingWork,
    PixelScaling,
    desired_replicas,
    pixel_scaling,
    queued_pixels,
)
from deployments.stages.stage_messages import ItemJob
from preprocess.pixel_count import count_pixels
from preprocess.schema import ChatPrompt
from tests.pictures import disc, encoded

TIMEOUT = 30
APP = "preprocess"
PIXELS_4K = 3840 * 2160
HUGE_SIDE = 5000  # pixels
IN_FLIGHT = 12  # below `max_ongoing_requests`: no call queues, so none hides what it weighs

amounts = st.floats(0, 1e12)
targets = st.floats(1e3, 1e10)


# The policy


@given(amounts, targets, st.integers(1, 4), st.integers(4, 100))
def test_each_replica_has_the_target_or_less(pixels: float, target: float, at_least: int, at_most: int) -> None:
    desired = desired_replicas(pixels, target, at_least=at_least, at_most=at_most)
    assert at_least <= desired <= at_most
    assert desired == at_most or pixels <= desired * target
    assert desired == at_least or pixels > (desired - 1) * target


@given(amounts, amounts, targets)
def test_more_pixels_never_mean_fewer_replicas(fewer: float, more: float, target: float) -> None:
    desired = [desired_replicas(pixels, target, at_least=1, at_most=50) for pixels in sorted((fewer, more))]
    assert desired == sorted(desired)


def test_what_queues_is_like_what_is_pending() -> None:
    assert queued_pixels(30, pending_pixels=200.0, pending_calls=10) == 600.0
    assert queued_pixels(30, pending_pixels=0.0, pending_calls=0) == 0.0


def context(queued: float = 0.0, bounds: tuple[int, int] = (1, 10), **replicas: tuple[float, float]) -> Any:
    """What the policy reads of Serve's context; `replicas` have (megapixels, calls) pending."""
    metrics = {
        PENDING_PIXELS: {name: megapixels * 1e6 for name, (megapixels, _) in replicas.items()},
        PENDING_CALLS: {name: calls for name, (_, calls) in replicas.items()},
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
    ],
)
def test_the_policy_sums_over_replicas_and_queues(given_context: Any, desired: int) -> None:
    assert PixelScaling(target_megapixels=17.0)(given_context) == (desired, {})


@pytest.mark.parametrize(("field", "desired"), [("aggregated_metrics", 1), ("total_queued_requests", 2)])
def test_what_serve_does_not_know_counts_as_nothing(field: str, desired: int) -> None:
    unknown = context(queued=100, a=(34, 2))
    setattr(unknown, field, None)
    assert PixelScaling(17.0)(unknown) == (desired, {})


def test_the_default_has_room_for_two_4k_pictures() -> None:
    target = AppConfig().preprocess.target_megapixels
    desired = [
        PixelScaling(target)(context(a=(number * (PIXELS_4K + CALL_PIXELS) / 1e6, number))) for number in range(1, 4)
    ]
    assert desired == [(1, {}), (1, {}), (2, {})]


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_target_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match="target_megapixels"):
        pixel_scaling(target)


# What is pending in a replica


def test_a_call_counts_until_it_ends_in_whichever_way() -> None:
    async def main() -> None:
        pending = PendingWork()
        ends = [asyncio.Event() for _ in range(3)]

        async def work(end: asyncio.Event, pixels: int, error: Exception | None = None) -> None:
            with pending.call(pixels):
                await end.wait()
                if error is not None:
                    raise error

        tasks = [asyncio.create_task(work(ends[0], 1)), asyncio.create_task(work(ends[1], 10, ValueError()))]
        tasks.append(asyncio.create_task(work(ends[2], 100)))
        await asyncio.sleep(0)
        seen = [pending.stats()]
        for stop in (ends[0].set, ends[1].set, tasks[2].cancel):
            stop()
            await asyncio.sleep(0.01)
            seen.append(pending.stats())
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [
            (stats[PENDING_CALLS], stats[PENDING_PIXELS] - stats[PENDING_CALLS] * CALL_PIXELS) for stats in seen
        ] == [
            (3, 111),
            (2, 110),
            (1, 100),
            (0, 0),
        ]

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
def preprocess(shapes: str) -> Iterator[DeploymentHandle[Any]]:
    """The stage as the application has it, without the others."""
    with ray_session(num_cpus=4):
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        stage = build_app(AppConfig(model=shapes))._bound_deployment.init_args[1]
        yield serve.run(stage, name=APP, route_prefix=None)
        serve.shutdown()


def process(handle: DeploymentHandle[Any], job: ItemJob) -> None:
    for _ in handle.options(stream=True).process_item.remote(job):
        pass


def render(handle: DeploymentHandle[Any]) -> None:
    for _ in handle.options(stream=True).render.remote(PROMPT, [], None):
        pass


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
            waiting.append(pending(preprocess)[PENDING_CALLS])
            time.sleep(0.2)
    assert statistics.mean(waiting) > IN_FLIGHT / 2


def test_items_count_from_their_arrival_until_they_fail_or_are_cancelled(preprocess: DeploymentHandle[Any]) -> None:
    with pytest.raises(RayTaskError):
        process(preprocess, BROKEN)
    assert pending(preprocess) == {PENDING_PIXELS: 0, PENDING_CALLS: 0}
    responses = [preprocess.options(stream=True).process_item.remote(HUGE) for _ in range(10)]
    deadline = time.monotonic() + TIMEOUT
    while (stats := pending(preprocess))[PENDING_CALLS] < 6:
        assert time.monotonic() < deadline
    assert stats[PENDING_PIXELS] == stats[PENDING_CALLS] * (HUGE_SIDE**2 + CALL_PIXELS)
    started = time.monotonic()
    for response in responses:
        response.cancel()
    while pending(preprocess)[PENDING_CALLS] > 0:
        assert time.monotonic() < started + TIMEOUT
    assert time.monotonic() - started < 1.0  # the item in work, at most, is waited for


def test_as_many_large_pictures_start_another_replica(preprocess: DeploymentHandle[Any]) -> None:
    with in_flight([partial(process, preprocess, HUGE)] * IN_FLIGHT):
        deadline = time.monotonic() + TIMEOUT
        while num_replicas() < 2:
            assert time.monotonic() < deadline
            time.sleep(0.5)
