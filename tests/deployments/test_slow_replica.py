"""One of two replicas of a stage stands still for some seconds: most requests go past it, and none is lost."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from deployments.config import AppConfig
from tests.pictures import disc, encoded, user_message
from tests.replicas import replica_pids
from tests.waiting import wait_until

COLOURS = ("red", "green", "blue")
NUM_CLIENTS = 12
HELD_UP_SECONDS = 6.0
"""Less than it takes until the replica counts as dead."""


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    two = {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.5}
    return AppConfig.model_validate({"model": shapes, "preprocess": two, "encode": two, "generate": two})


@pytest.mark.parametrize("deployment", ["Preprocess", "Encode", "Generate"])
def test_requests_go_past_a_replica_that_stands_still(client: OpenAI, deployment: str) -> None:
    wait_until(lambda: len(replica_pids(deployment)) == 2)
    victim = replica_pids(deployment)[0]
    num_answered, is_over, lock = 0, threading.Event(), threading.Lock()

    def ask_on(number: int) -> list[str]:
        """Asks about ever new pictures; returns the wrong answers."""
        nonlocal num_answered
        wrong, count = [], 0
        while not is_over.is_set():
            colour, count = COLOURS[(number + count) % 3], count + 1
            picture = encoded(disc(colour, (96, 96), (36, 36))) + f"{deployment} {number} {count}".encode()
            message = user_message("What colour is the circle?", picture)
            completion = client.chat.completions.create(model="shapes", messages=[message], temperature=0)
            if (answer := completion.choices[0].message.content) != colour:
                wrong.append(f"{answer} for {colour}")
            with lock:
                num_answered += 1
        return wrong

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        clients = [threads.submit(ask_on, number) for number in range(NUM_CLIENTS)]
        try:
            wait_until(lambda: num_answered > NUM_CLIENTS)
            os.kill(victim, signal.SIGSTOP)
            time.sleep(1)  # whatever had left it before has come
            before = num_answered
            time.sleep(HELD_UP_SECONDS - 1)
            meanwhile = num_answered - before
        finally:
            os.kill(victim, signal.SIGCONT)
            is_over.set()
        assert [one.result() for one in clients] == [[]] * NUM_CLIENTS
    assert meanwhile > NUM_CLIENTS, "the other replica answers those that come"
    assert victim in replica_pids(deployment), "it was slow, not dead"
