"""The cache of processed items, on its own: the application keeps no embeddings, so every request encodes anew."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from raylens.deployments.config import AppConfig
from raylens.deployments.stages.process_setup import ENCODER_NICENESS, PREPROCESS_NICENESS
from tests.metric_values import LATENESS_SECONDS
from tests.pictures import disc, encoded, user_message
from tests.replicas import proxy_pids, replica_pids

pytestmark = pytest.mark.slow

NUM_BYTES = 3 * 96 * 96 * 4  # of one processed picture
NUM_KEPT = 4


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    caches = {"embedding_cache_bytes": 0, "processor_cache_bytes": NUM_KEPT * NUM_BYTES}
    # A busy machine takes long to replace a killed replica.
    return AppConfig.model_validate({"model": shapes, "shared": caches, "ingress": {"away_timeout_s": 60}})


def ask(client: OpenAI, picture: bytes | None, uuid: str | None = None) -> Any:
    """The answer about the colour of a shape, and which stages worked for it."""
    message = user_message("What colour is the circle?", *([] if picture is None else [picture]))
    if picture is None:
        message["content"].insert(0, {"type": "image_url"})
    if uuid is not None:
        message["content"][0]["uuid"] = uuid
    return client.chat.completions.create(
        model="shapes", messages=[message], extra_body={"stage_timings": True}, temperature=0
    )


def circle(colour: str, number: int = 0) -> bytes:
    """A picture that no other number gives."""
    return encoded(disc(colour, (96, 96), (36, 36)), "PNG", compress_level=number)


def cache_metric(app_url: str, name: str) -> float:
    time.sleep(1 + LATENESS_SECONDS)  # it is reported once a second
    lines = [line for line in httpx.get(f"{app_url}/metrics").text.splitlines() if not line.startswith("#")]
    (value,) = [float(line.split()[-1]) for line in lines if name in line.split("{")[0]]
    return value


def test_a_repeated_picture_is_encoded_but_not_processed_again(client: OpenAI) -> None:
    first, second = (ask(client, circle("red")) for _ in range(2))
    assert [answer.choices[0].message.content for answer in (first, second)] == ["red", "red"]
    assert "processor" in first.stage_timings["seconds"]
    assert {"processor", "media_decode"}.isdisjoint(second.stage_timings["seconds"])
    assert "encode" in second.stage_timings["seconds"]
    assert second.stage_timings["processor_cache_hits"] == 1


def niceness(pids: list[int]) -> set[int]:
    """Of the threads of the processes; field 19 of /proc/PID/task/TID/stat."""
    assert pids
    stats = [(task / "stat").read_text() for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return {int(stat.rpartition(")")[2].split()[16]) for stat in stats}


def test_work_on_pictures_gives_way_to_decoding_and_to_answering(client: OpenAI) -> None:
    ask(client, circle("red"))
    answering = os.getpriority(os.PRIO_PROCESS, 0)
    computing = answering + PREPROCESS_NICENESS
    assert max(niceness(replica_pids("Preprocess"))) == computing  # prompts do not wait for items
    assert max(niceness(replica_pids("Encode"))) == answering + ENCODER_NICENESS
    for pids in (replica_pids("Generate"), replica_pids("Ingress"), proxy_pids()):
        assert niceness(pids) == {answering}


def test_processed_pictures_outlive_the_replica_that_made_them(client: OpenAI) -> None:
    ask(client, circle("blue"), uuid="mine")
    (pid,) = replica_pids("Preprocess")
    os.kill(pid, signal.SIGKILL)
    for picture in (circle("blue"), None):
        answer = ask(client, picture, uuid="mine")
        assert answer.choices[0].message.content == "blue"
        assert answer.stage_timings["processor_cache_hits"] == 1
    assert pid not in replica_pids("Preprocess")


def test_the_cache_keeps_within_its_bytes_and_forgets_the_oldest(client: OpenAI, app_url: str) -> None:
    pictures = [circle("red", number) for number in range(NUM_KEPT + 1)]
    assert len(set(pictures)) == len(pictures)
    for number, picture in enumerate(pictures):
        ask(client, picture, uuid=f"number {number}")
    assert ask(client, pictures[-1]).stage_timings["processor_cache_hits"] == 1
    assert ask(client, pictures[0]).stage_timings["processor_cache_hits"] == 0
    with pytest.raises(BadRequestError) as caught:
        ask(client, None, uuid="number 1")
    assert caught.value.code == "media_not_cached"
    assert cache_metric(app_url, "mm_cache_bytes") == NUM_KEPT * NUM_BYTES
