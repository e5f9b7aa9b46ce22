"""`/v1/batches` through the official client, against a real server."""

import json
import time
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI
from openai.types import Batch

from raylens.deployments.config import AppConfig
from tests.pictures import disc, encoded, user_message
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS: Any = "/v1/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    # That of test_batch.py, so that both are served by one application.
    return AppConfig.model_validate({"model": shapes, "admission": {"total": {"requests": 8}}})


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"max_tokens": 8, **body}}


def text(custom_id: str, **body: Any) -> dict[str, Any]:
    return line(custom_id, COMPLETIONS, prompt=f"Hello {custom_id}", **body)


def endless(number: int, num_tokens: int) -> list[dict[str, Any]]:
    fields = {"ignore_eos": True, "min_tokens": num_tokens, "max_tokens": num_tokens}
    return [text(f"{one}", **fields) for one in range(number)]


def begun(client: OpenAI, lines: Iterable[Any], endpoint: Any = COMPLETIONS, **fields: Any) -> Batch:
    content = "".join(json.dumps(one) + "\n" for one in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.purpose, file.bytes) == ("batch", len(content))
    assert client.files.content(file.id).read() == content
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def answers(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    """The responses by the ids of their requests. Each is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    found = {one["custom_id"]: one["response"] for one in lines}
    assert len(found) == len(lines)
    assert all(one["id"] == f"batch_req_{one['response']['request_id']}" and one["error"] is None for one in lines)
    return found


def test_the_official_client_runs_a_batch(client: OpenAI) -> None:
    """Each request is answered as it would be alone."""
    message = user_message("What colour is the circle?", encoded(disc("red", (96, 96), (36, 36))))
    wrong = line("wrong", messages=[message], temperature=-1)
    nobody = line("nobody", model="nobody", messages=[message])
    batch = begun(client, [line("right", messages=[message]), wrong, nobody], CHAT, metadata={"run": "7"})
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"run": "7"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = ended(client, batch)
    assert done.request_counts is not None
    assert (done.status, done.request_counts.to_dict()) == ("completed", {"total": 3, "completed": 1, "failed": 2})
    assert done.completed_at is not None is not done.in_progress_at
    right = answers(client, done.output_file_id)
    assert right.keys() == {"right"}
    assert (right["right"]["status_code"], right["right"]["body"]["choices"][0]["message"]["content"]) == (200, "red")
    refused = answers(client, done.error_file_id)
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="shapes", messages=[message], temperature=-1)
    assert (refused["wrong"]["status_code"], refused["wrong"]["body"]) == (400, caught.value.response.json())
    error = refused["nobody"]["body"]["error"]
    assert (refused["nobody"]["status_code"], error["code"]) == (404, "model_not_found")
    newest = client.batches.list(limit=1)
    assert newest.data[0].id == batch.id
    outputs = [one.id for one in client.files.list(purpose="batch_output", order="desc", limit=2)]
    assert set(outputs) >= {done.output_file_id, done.error_file_id}
    for one in outputs:
        assert client.files.delete(one).deleted


@pytest.mark.parametrize(
    ("endpoint", "body", "read"),
    [
        (COMPLETIONS, {"prompt": "Hello"}, lambda body: body["choices"][0]["text"]),
        ("/v1/responses", {"input": "Who are you?"}, lambda body: body["output"][0]["content"][0]["text"]),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}, lambda body: body["content"][0]["text"]),
    ],
)
def test_every_route_that_generates_text_can_be_asked(client: OpenAI, endpoint: str, body: Any, read: Any) -> None:
    done = ended(client, begun(client, [line("a", endpoint, **body)], endpoint))
    answer = answers(client, done.output_file_id)["a"]
    url = str(client.base_url).removesuffix("/v1/") + endpoint
    alone = httpx.post(url, json={"max_tokens": 8, **body}).json()
    assert read(answer["body"]) == read(alone)


def test_wrong_lines_fail_a_batch_by_their_numbers(client: OpenAI) -> None:
    lines = [text("a"), [], text("a"), line("b", CHAT), text("c", stream=True), text("d") | {"method": "GET"}, {}]
    done = ended(client, begun(client, lines))
    assert done.errors is not None
    found = [(one.line, one.code, one.param) for one in done.errors.data or []]
    assert found == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_url", "url"),
        (5, "invalid_body", "body"),
        (6, "invalid_method", "method"),
        (7, "invalid_custom_id", "custom_id"),
    ]
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.failed_at is not None


def test_what_is_no_batch_is_refused_by_name(client: OpenAI) -> None:
    fields: Any = {"endpoint": COMPLETIONS, "completion_window": "24h"}
    with pytest.raises(NotFoundError) as caught:
        client.batches.create(input_file_id="file-nobody", **fields)
    assert (caught.value.code, caught.value.param) == ("file_not_found", "input_file_id")
    picture = client.files.create(file=("a.png", b"content"), purpose="vision")
    with pytest.raises(BadRequestError, match="a batch takes one of 'batch'"):
        client.batches.create(input_file_id=picture.id, **fields)
    with pytest.raises(BadRequestError, match="endpoint"):
        client.batches.create(input_file_id=picture.id, **fields | {"endpoint": "/v1/images/edits"})
    with pytest.raises(BadRequestError, match="completion_window"):
        client.batches.create(input_file_id=picture.id, **fields | {"completion_window": "1h"})
    with pytest.raises(APIStatusError, match="a batch of 50001 lines, the limit is 50000") as large:
        client.files.create(file=("a", b"{}\n" * 50_001), purpose="batch")
    assert (large.value.status_code, large.value.body["param"]) == (413, "file")  # type: ignore[index]
    with pytest.raises(BadRequestError, match="has no requests"):
        client.files.create(file=("a", b"\n"), purpose="batch")
    for act in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(NotFoundError) as gone:
            act("batch_nobody")
        assert gone.value.code == "batch_not_found"


def test_a_batch_is_cancelled(client: OpenAI, app_url: str) -> None:
    batch = begun(client, endless(64, 1500))

    def num_answered() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts.completed if counts is not None else 0

    wait_until(lambda: num_answered() > 0)
    assert client.batches.retrieve(batch.id).output_file_id is None, "it is there at the end"
    cancelled = client.batches.cancel(batch.id)
    assert (cancelled.status, cancelled.cancelled_at is not None) == ("cancelled", True)
    assert cancelled.request_counts is not None
    assert len(answers(client, cancelled.output_file_id)) == cancelled.request_counts.completed < 64
    wait_until(lambda: running(app_url) == 0)
    done = ended(client, begun(client, [text("a")]))
    with pytest.raises(BadRequestError, match="is completed, so it cannot be cancelled"):
        client.batches.cancel(done.id)


def running(app_url: str) -> float:
    lines = httpx.get(f"{app_url}/metrics").text.splitlines()
    return sum(float(one.split()[-1]) for one in lines if one.startswith("raylens_requests_running"))


def test_batches_are_listed_in_pages(client: OpenAI) -> None:
    made = [begun(client, [text("a")]).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert ([one.id for one in page.data], page.has_more) == ([made[2], made[1]], True)
    assert next(iter(client.batches.list(limit=2, after=made[1]))).id == made[0]
    with pytest.raises(BadRequestError, match="no item 'batch_x' in this list"):
        client.batches.list(after="batch_x")


def test_a_batch_whose_file_is_deleted_fails(client: OpenAI) -> None:
    """The files of a batch may be gone before an ingress begins with it."""
    content = "".join(json.dumps(one) + "\n" for one in endless(200, 200)).encode()
    others = [begun(client, endless(20, 1000)) for _ in range(4)]  # all that an ingress works on at once
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    assert batch.status == "validating"
    client.files.delete(file.id)
    for one in others:
        client.batches.cancel(one.id)
    done = ended(client, batch)
    assert done.errors is not None
    assert (done.status, [one.code for one in done.errors.data or []]) == ("failed", ["file_not_found"])


def test_live_requests_overtake_a_batch(client: OpenAI) -> None:
    """None is refused, and none waits for the batch's end."""
    batch = begun(client, endless(100, 1000))
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    started = time.monotonic()
    for number in range(8):
        answer = client.completions.create(model="shapes", prompt=f"Live {number}", max_tokens=4)
        assert answer.choices[0].text
    took = time.monotonic() - started
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    assert counts.completed < 50, f"{counts.completed} of 100 were answered in {took:.1f} s"
    client.batches.cancel(batch.id)
