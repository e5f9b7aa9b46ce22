"""Two replicas of Encode: they share a request's pictures, and what one takes with it is encoded by the other."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from deployments.config import AppConfig
from tests.metric_values import exported
from tests.pictures import disc, encoded, user_message
from tests.replicas import replica_pids

COLOURS = ["red", "green", "blue"]
PATCHES = 36  # of a picture


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    encode = {"num_replicas": 2, "max_batch_patches": PATCHES, "num_cpus": 0.5}
    return AppConfig.model_validate({"model": shapes, "encode": encode})


def circle(number: int) -> tuple[str, bytes]:
    """A colour and a picture of it that no other number gives."""
    colour = COLOURS[number % len(COLOURS)]
    return colour, encoded(disc(colour, (96 + number // 40, 96 + number % 40), (36, 36)))


def ask(client: OpenAI, *pictures: bytes) -> Any:
    message = user_message("What colour is the circle?", *pictures)
    return client.chat.completions.create(model="shapes", messages=[message], temperature=0, max_tokens=8)


def jiffies_run(pid: int) -> int:
    """Jiffies that a process has run: fields 14 and 15 of /proc/PID/stat, counted behind the name in brackets."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_one_requests_pictures_are_spread_over_the_replicas(client: OpenAI) -> None:
    first, second = replica_pids("Encode")
    before = [jiffies_run(pid) for pid in (first, second)]
    for start in range(0, 48, 12):
        ask(client, *(circle(1000 + start + index)[1] for index in range(12)))
    assert all(jiffies_run(pid) > ran for pid, ran in zip((first, second), before, strict=True))


def test_a_replica_killed_in_the_middle_of_64_encodes(client: OpenAI, app_url: str) -> None:
    """Half of the pictures are in a replica that does not answer, then is gone: each request is answered all the same,
    and right."""
    recomputed = exported(app_url, "items_recomputed", stage="encode")
    pid = replica_pids("Encode")[0]
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(64) as pool:
        pictures = [circle(number) for number in range(64)]
        answers = [pool.submit(ask, client, picture) for _, picture in pictures]
        deadline = time.monotonic() + 60
        while sum(answer.done() for answer in answers) < 16:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert sum(not answer.done() for answer in answers) > 8, "or nothing was in its hands"
        os.kill(pid, signal.SIGKILL)
        told = [answer.result().choices[0].message.content for answer in answers]
    assert told == [colour for colour, _ in pictures]
    assert exported(app_url, "items_recomputed", stage="encode") - recomputed > 8
