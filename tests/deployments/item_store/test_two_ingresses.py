"""Two replicas of the ingress and two shards: what one door has is there at the other, and no death takes it along."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from openai import APIConnectionError, BadRequestError, NotFoundError, OpenAI

from raylens.deployments.config import AppConfig
from raylens.deployments.endpoint.api_keys import hash_key
from raylens.deployments.routing.replica_choice import rank
from tests.listening import listeners
from tests.metric_values import LATENESS_SECONDS
from tests.pictures import disc, encoded, user_message
from tests.replicas import replica_log, replica_pids
from tests.waiting import wait_until

SHARDS = ("Shared-0", "Shared-1")
TENANT = {"Authorization": "Bearer unused"}
SHARD_OF_TENANT = f"Shared-{rank(hash_key('unused'), ['0', '1'])[0]}"
MOST_BYTES = 40_000_000  # of bodies


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    return AppConfig.model_validate(
        {
            "model": shapes,
            "ingress": {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.1},
            "shared": {"shards": 2, "num_cpus": 0.1},
            "admission": {"total": {"requests": 64, "bytes": MOST_BYTES, "pixels": 2**31, "tokens": 2**22}},
        }
    )


@pytest.fixture(scope="module")
def keeps_app_as_it_is() -> bool:
    return False


class Door:
    """A replica of the ingress, spoken to past HAProxy."""

    def __init__(self, pid: int, url: str) -> None:
        self.pid = pid
        self.url = url
        self.client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)

    def ask(self, *pictures: bytes, uuid: str | None = None, **fields: Any) -> Any:
        """The answer about the colour of a shape, and what was found in which cache."""
        message = user_message("What colour is the circle?", *pictures)
        if not pictures:
            message["content"].insert(0, {"type": "image_url"})
        if uuid is not None:
            message["content"][0]["uuid"] = uuid
        extra = {"stage_timings": True, **fields}
        return self.client.chat.completions.create(
            model="shapes", messages=[message], temperature=0, max_tokens=8, extra_body=extra
        )

    def is_healthy(self) -> bool:
        try:
            health = httpx.get(f"{self.url}/health", timeout=5)
            return health.status_code == 200 and '"ready":' in health.text  # the exporter of metrics has one page only
        except httpx.TransportError:
            return False


def doors_now() -> list[Door]:
    found = []
    for pid in sorted(replica_pids("Ingress")):
        ports = [one.port for one in listeners(pid) if one.address == "loopback"]
        found += [door for port in ports if (door := Door(pid, f"http://127.0.0.1:{port}")).is_healthy()]
    return found


@pytest.fixture
def doors(app_url: str) -> list[Door]:
    """Both of them, with both shards there."""
    assert httpx.get(f"{app_url}/health").status_code == 200
    wait_until(lambda: len(doors_now()) == 2 and all(map(replica_pids, SHARDS)), 60)
    return doors_now()


def colour_of(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def circle(colour: str, number: int) -> bytes:
    """A picture that no other number gives."""
    return encoded(disc(colour, (96 + number // 64, 96 + number % 64), (36, 36)))


def metric(app_url: str, name: str, **tags: str) -> float:
    """The sum over all replicas."""
    time.sleep(1 + LATENESS_SECONDS)
    wanted = [f'{tag}="{value}"' for tag, value in tags.items()]
    lines = httpx.get(f"{app_url}/metrics").text.splitlines()
    found = [line for line in lines if line.split("{")[0] == f"raylens_{name}" and all(one in line for one in wanted)]
    return sum(float(line.split()[-1]) for line in found)


def test_a_picture_sent_to_one_door_is_known_at_the_other(doors: list[Door]) -> None:
    for number in range(8):  # of both shards
        first, second = doors[number % 2], doors[1 - number % 2]
        made = first.ask(circle("red", number))
        found = second.ask(circle("red", number))
        assert (colour_of(made), colour_of(found)) == ("red", "red")
        assert made.stage_timings["embedding_cache_hits"] == 0
        assert found.stage_timings["embedding_cache_hits"] == 1
        assert "processor" not in found.stage_timings["seconds"]


def test_sixteen_equal_pictures_at_both_doors_at_once_are_encoded_once(doors: list[Door], app_url: str) -> None:
    before = metric(app_url, "encoder_items_total")
    picture = encoded(disc("blue", (96, 97), (36, 36)).resize((1200, 1200)), "BMP")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: doors[number % 2].ask(picture), range(4)))
    assert {colour_of(answer) for answer in answers} == {"blue"}
    small = circle("green", 70)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: doors[number % 2].ask(small), range(16)))
    assert {colour_of(answer) for answer in answers} == {"green"}
    assert metric(app_url, "encoder_items_total") - before == 2


def test_a_name_given_at_one_door_is_known_at_the_other(doors: list[Door]) -> None:
    for number in range(4):
        doors[0].ask(circle("blue", 100 + number), uuid=f"name {number}")
        assert colour_of(doors[1].ask(uuid=f"name {number}")) == "blue"
    with pytest.raises(BadRequestError, match="no item is kept under the uuid 'nobody'"):
        doors[1].ask(uuid="nobody")


@pytest.mark.parametrize("size", [96, 1000], ids=["in a message", "through the object store"])
def test_a_file_sent_to_one_door_is_there_at_the_other(doors: list[Door], size: int) -> None:
    content = encoded(disc("green", (size, size), (36, 36)), "BMP")
    sent = doors[0].client.files.create(file=("a.bmp", content), purpose="vision")
    assert doors[1].client.files.content(sent.id).read() == content
    assert sent.id in [one.id for one in doors[1].client.files.list()]
    assert doors[1].client.files.delete(sent.id).deleted
    with pytest.raises(NotFoundError):
        doors[0].client.files.retrieve(sent.id)


def long_response(door: Door) -> Any:
    """One that is made in the background."""
    endless = {"ignore_eos": True, "min_tokens": 2000}
    return door.client.responses.create(
        model="shapes", input="Hello", max_output_tokens=2000, background=True, extra_body=endless
    )


def test_a_response_made_at_one_door_goes_on_at_the_other(doors: list[Door]) -> None:
    first = doors[0].client.responses.create(model="shapes", input="Who are you?")
    second = doors[1].client.responses.create(model="shapes", input="And?", previous_response_id=first.id)
    assert doors[0].client.responses.retrieve(second.id).output_text == second.output_text
    begun = long_response(doors[0])
    assert doors[1].client.responses.retrieve(begun.id).status == "in_progress"
    assert doors[1].client.responses.cancel(begun.id).status == "cancelled"
    assert doors[0].client.responses.retrieve(begun.id).status == "cancelled"


@contextmanager
def half_sent(door: Door, num_bytes: int) -> Iterator[None]:
    """A request of which so many bytes have come, and no more come while the block runs."""
    with socket.create_connection(("127.0.0.1", urlsplit(door.url).port or 0)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes + 1}\r\n\r\n"
        connection.sendall(head.encode() + body_of(num_bytes))
        time.sleep(0.5)  # until it has been read
        yield


def body_of(num_bytes: int) -> bytes:
    return b'{"prompt": "Hello", "max_tokens": 1, "user": "' + b"x" * (num_bytes - 49) + b'"}'


def status_of(door: Door, num_bytes: int) -> tuple[int, str]:
    answer = httpx.post(f"{door.url}/v1/completions", content=body_of(num_bytes), timeout=60)
    return answer.status_code, answer.json().get("error", {}).get("code", "")


def has_room(door: Door, num_bytes: int) -> bool:
    return status_of(door, num_bytes) != (429, "overloaded_bytes")


def has_share(door: Door, num_bytes: int) -> bool:
    """Whether it admits so many bytes at once, and no more."""
    with half_sent(door, 5_000_000):
        return has_room(door, num_bytes - 6_000_000) and not has_room(door, num_bytes - 4_000_000)


def has_half(door: Door) -> bool:
    return has_share(door, MOST_BYTES // 2)


def test_both_doors_together_admit_the_budget(doors: list[Door]) -> None:
    for door in doors:
        wait_until(partial(has_half, door), 30)
    with half_sent(doors[0], 18_000_000), half_sent(doors[1], 18_000_000):
        for door in doors:
            assert has_room(door, 1_500_000)
            assert not has_room(door, 4_000_000)


def test_a_request_larger_than_a_doors_share_is_admitted_alone(doors: list[Door]) -> None:
    for door in doors:
        wait_until(partial(has_half, door), 30)
        assert has_room(door, 38_000_000)


@pytest.mark.slow
def test_a_second_door_halves_the_share_of_the_first(doors: list[Door]) -> None:
    """The second starts while the first has all."""
    os.kill(doors[0].pid, signal.SIGKILL)
    wait_until(partial(has_share, doors[1], MOST_BYTES), 30)
    wait_until(lambda: len(doors_now()) == 2, 60)
    wait_until(partial(has_half, doors[1]), 30)


def long_stream(door: Door, number: int) -> Any:
    return door.client.completions.create(
        model="shapes",
        prompt=f"Hello {number}",
        stream=True,
        max_tokens=2000,
        extra_body={"ignore_eos": True, "min_tokens": 2000},
    )


def test_a_dead_door_s_streams_are_cut_and_nothing_else_is_lost(doors: list[Door], app_url: str) -> None:
    doors[0].ask(circle("red", 200), uuid="of the dead door")
    sent = doors[0].client.files.create(file=("a.png", b"content"), purpose="vision")
    said = doors[0].client.responses.create(model="shapes", input="Who are you?")
    lost, goes_on = long_response(doors[0]), long_response(doors[1])
    living, dying = long_stream(doors[1], 1), long_stream(doors[0], 2)
    pieces = [next(iter(stream)) for stream in (living, dying)]
    assert pieces
    os.kill(doors[0].pid, signal.SIGKILL)
    with pytest.raises(APIConnectionError):
        list(dying)
    assert len(list(living)) > 100
    found = doors[1].ask(uuid="of the dead door")
    assert (colour_of(found), found.stage_timings["embedding_cache_hits"]) == ("red", 1)
    assert doors[1].client.files.content(sent.id).read() == b"content"
    responses = doors[1].client.responses
    assert responses.retrieve(said.id).output_text == said.output_text
    assert responses.retrieve(goes_on.id).status in ("in_progress", "incomplete")
    told = responses.retrieve(lost.id)
    assert told.error is not None
    assert (told.status, told.error.message) == ("failed", "the process that made this response has ended")
    wait_until(lambda: len(doors_now()) == 2, 60)
    found = next(door for door in doors_now() if door.pid != doors[1].pid).ask(circle("red", 200))
    assert found.stage_timings["embedding_cache_hits"] == 1


def batch_of(door: Door, number: int, **fields: Any) -> str:
    """The id of a batch of so many questions about few pictures."""

    def line(custom_id: int) -> dict[str, Any]:
        message = user_message(
            "What colour is the circle?", circle("green" if custom_id % 2 else "blue", custom_id % 8)
        )
        body = {"model": "shapes", "messages": [message], "temperature": 0, "max_tokens": 8, **fields}
        return {"custom_id": f"{custom_id}", "method": "POST", "url": "/v1/chat/completions", "body": body}

    content = "".join(json.dumps(line(one)) + "\n" for one in range(number)).encode()
    file = door.client.files.create(file=("in.jsonl", content), purpose="batch")
    fields = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return door.client.batches.create(input_file_id=file.id, **fields).id


def told(app_url: str, batch_id: str) -> dict[str, Any]:
    """The batch, asked at the front door; nothing while a door or the shard starts again."""
    try:
        found: dict[str, Any] = httpx.get(f"{app_url}/v1/batches/{batch_id}", headers=TENANT, timeout=30).json()
    except (httpx.TransportError, ValueError):
        return {}
    return found


def num_answered(app_url: str, batch_id: str) -> int:
    counts = told(app_url, batch_id).get("request_counts", {"completed": 0, "failed": 0})
    answered: int = counts["completed"] + counts["failed"]
    return answered


def runner(app_url: str, batch_id: str) -> int:
    """The process that works on the batch: the one whose log grows by its lines."""
    lines = {pid: replica_log(pid).count(" /v1/chat/completions 200 ") for pid in replica_pids("Ingress")}
    before = num_answered(app_url, batch_id)
    wait_until(lambda: num_answered(app_url, batch_id) >= before + 4)
    grown = [pid for pid, one in lines.items() if replica_log(pid).count(" /v1/chat/completions 200 ") > one]
    (pid,) = grown
    return pid


def check_batch(app_url: str, batch_id: str, number: int, seconds: float) -> None:
    """Each request has one answer, and it is right."""
    wait_until(lambda: told(app_url, batch_id).get("status") == "completed", seconds)
    batch = told(app_url, batch_id)
    assert batch["request_counts"] == {"total": number, "completed": number, "failed": 0}
    output = httpx.get(f"{app_url}/v1/files/{batch['output_file_id']}/content", headers=TENANT, timeout=30).text
    answers = [json.loads(one) for one in output.splitlines()]
    assert sorted(int(one["custom_id"]) for one in answers) == list(range(number))
    for one in answers:
        text = one["response"]["body"]["choices"][0]["message"]["content"]
        assert text.startswith("green" if int(one["custom_id"]) % 2 else "blue")


def test_a_batch_goes_on_when_its_ingress_dies_and_when_its_shard_does(doors: list[Door], app_url: str) -> None:
    number = 400  # so many that it is not over before the second kill
    batch_id = batch_of(doors[0], number)
    wait_until(lambda: num_answered(app_url, batch_id) >= 10)
    os.kill(runner(app_url, batch_id), signal.SIGKILL)
    reached = num_answered(app_url, batch_id)
    wait_until(lambda: num_answered(app_url, batch_id) >= reached + 10)
    assert told(app_url, batch_id)["status"] == "in_progress"
    os.kill(replica_pids(SHARD_OF_TENANT)[0], signal.SIGKILL)
    check_batch(app_url, batch_id, number, 120)
    wait_until(lambda: len(doors_now()) == 2, 60)


@pytest.mark.slow
def test_two_thousand_requests_outlive_three_replicas_and_the_ingress_that_sends_them(
    doors: list[Door], app_url: str
) -> None:
    number = 2000
    batch_id = batch_of(doors[0], number)
    for reached, name in ((200, "Generate"), (500, SHARD_OF_TENANT), (800, "Ingress"), (1200, "Encode")):
        wait_until(lambda reached=reached: num_answered(app_url, batch_id) >= reached, 280)  # type: ignore[misc]
        pid = runner(app_url, batch_id) if name == "Ingress" else replica_pids(name)[0]
        os.kill(pid, signal.SIGKILL)
    check_batch(app_url, batch_id, number, 280)


@pytest.mark.parametrize(
    "stage", ["Encode", *(pytest.param(one, marks=pytest.mark.slow) for one in ("Preprocess", "Generate"))]
)
def test_items_outlive_the_stages_that_made_them(doors: list[Door], stage: str) -> None:
    number = 300 + ["Preprocess", "Encode", "Generate"].index(stage)
    doors[0].ask(circle("blue", number))
    (pid,) = replica_pids(stage)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: replica_pids(stage) not in ([], [pid]) and all(door.is_healthy() for door in doors), 60)
    found = doors[1].ask(circle("blue", number))
    assert (colour_of(found), found.stage_timings["embedding_cache_hits"]) == ("blue", 1)


@pytest.mark.parametrize("shard", [pytest.param(SHARDS[0], marks=pytest.mark.slow), *SHARDS[1:]])
def test_a_dead_shards_items_are_made_anew_and_no_request_fails(doors: list[Door], shard: str) -> None:
    numbers = range(400, 416)
    for number in numbers:
        doors[0].ask(circle("red", number))
    files = [doors[0].client.files.create(file=(f"{n}", b"content"), purpose="vision").id for n in range(2)]
    said = doors[0].client.responses.create(model="shapes", input="Who are you?")
    (pid,) = replica_pids(shard)
    is_dead = threading.Event()
    wrong: list[str] = []

    def ask_on(door: Door) -> int:
        num_asked = 0
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not (is_dead.is_set() and num_asked > 30 and replica_pids(shard)):
            colour = "red" if num_asked % 2 else "blue"
            answer = colour_of(door.ask(circle(colour, numbers[num_asked % len(numbers)])))
            if answer != colour:
                wrong.append(answer)
            num_asked += 1
        return num_asked

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_on, door) for door in doors * 2]
        time.sleep(1)
        os.kill(pid, signal.SIGKILL)
        is_dead.set()
        assert min(one.result() for one in asking) > 10
    assert wrong == []
    wait_until(lambda: replica_pids(shard) not in ([], [pid]) and all(door.is_healthy() for door in doors), 60)
    found = [doors[1].ask(circle("red", number)).stage_timings["embedding_cache_hits"] for number in numbers]
    assert sum(found) > 0, "the other shard still has its own"
    for file in files:
        assert doors[1].client.files.content(file).read() == b"content"
    assert doors[1].client.responses.retrieve(said.id).output_text == said.output_text
