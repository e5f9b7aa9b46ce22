"""Who gets in: keys on every route, tenants apart, room for all, and clients that send too much or too slowly."""

import base64
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI, RateLimitError
from playwright.sync_api import expect

from raylens.deployments.config import AppConfig
from raylens.deployments.endpoint.api_keys import hash_key
from tests.background import Background
from tests.chromium import chromium
from tests.metric_values import exported
from tests.page_driver import ask, pick, send
from tests.pictures import disc, encoded, user_message
from tests.replicas import proxy_pids, replica_pids
from tests.waiting import wait_until

KEYS = {"alice": "rl-alice", "bob": "rl-bob", "carol": "rl-carol", "dave": "rl-dave"}
PRIORITIES = {"bob": 5}
ADMIN = "carol"
"""Who may read /metrics."""
MIB = 2**20
MAX_BODY = 48 * MIB
BODY_TIMEOUT_S = 3.0
LONG = 60_000
"""Tokens of an answer that outlasts what a test does meanwhile."""


def write_keys(file: Path, keys: dict[str, str]) -> None:
    entries = [
        {
            "name": name,
            "sha256": hash_key(key),
            "priority": PRIORITIES.get(name, 0),
            "admin": name == ADMIN,
        }
        for name, key in keys.items()
    ]
    file.write_text(yaml.safe_dump(entries))


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(file, KEYS)
    return file


@pytest.fixture(scope="module")
def long_shapes(shapes: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with room for answers of `LONG` tokens: 2,000 tokens take less than a second."""
    folder = Path(shutil.copytree(shapes, tmp_path_factory.mktemp("long") / "shapes"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2 * LONG
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def app_config(long_shapes: Path, keys_file: Path) -> AppConfig:
    limits = {"bytes": 3 * MAX_BODY, "pixels": 10**8, "tokens": 10**6}
    admission = {
        "total": {"requests": 4, **limits},
        "per_key": {"requests": 1, **limits},
        "max_queued_requests": 2,
        "max_queue_seconds": 1.5,
        "max_body_bytes": MAX_BODY,
        "body_timeout_s": BODY_TIMEOUT_S,
    }
    return AppConfig.model_validate(
        {
            "model": str(long_shapes),
            "encode": {"placement": "inline"},
            "auth": {"keys_file": str(keys_file)},
            "admission": admission,
            "media": {"limits": {"max_items": 4}},
            "generate": {"engine": {"max_num_seqs": 2}},
        }
    )


def connected(url: str, headers: str) -> socket.socket:
    """A connection on which the head of a request has been sent, and nothing of its body."""
    to = urlsplit(url)
    assert to.hostname is not None
    connection = socket.create_connection((to.hostname, to.port or 80), timeout=30)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}\r\n"
    connection.sendall(head.encode())
    return connection


def client_of(url: str, name: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=KEYS.get(name, name), max_retries=0, timeout=60)


def hello(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="shapes", messages=[user_message("Hello")], **options)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def test_every_route_but_health_asks_for_a_key(app_url: str) -> None:
    health = ("/health", "/ping")
    assert [httpx.get(app_url + path).status_code for path in health] == [200, 200]
    routes = httpx.get(f"{app_url}/openapi.json", headers=bearer("alice")).json()["paths"]
    found = [(method, path) for path, methods in routes.items() for method in methods if path not in health]
    assert {("post", "/v1/chat/completions"), ("get", "/metrics"), ("delete", "/v1/files/{file_id}")} <= set(found)
    for method, path in [
        *found,
        ("get", "/dashboard/data"),
        ("get", "/examples"),
        ("get", "/openapi.json"),
        ("post", "/sign-in"),
        ("get", "/nothing"),
        ("head", "/v1/models"),
    ]:
        wrong = (
            {"authorization": "Bearer rl-wrong"},
            {"authorization": "Basic !"},
            {"x-api-key": "rl-wrong"},
            {"cookie": "raylens_key=rl"},
        )
        for headers in ({}, *wrong):
            response = httpx.request(method, app_url + path, headers=headers)
            assert response.status_code == 401, (method, path, headers)
            if method != "head":
                assert response.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{app_url}/v1/models", headers={"x-api-key": KEYS["alice"]}).status_code == 200
    # It asks before it reads: of this body nothing ever comes.
    with connected(app_url, "Content-Length: 1000000\r\n") as connection:
        assert b" 401 " in connection.recv(4096)


def test_the_official_client_with_a_right_and_a_wrong_key(app_url: str) -> None:
    assert hello(client_of(app_url, "alice")).choices[0].message.content
    with pytest.raises(AuthenticationError, match="the API key is not valid"):
        hello(client_of(app_url, "rl-nobody"))


def test_a_browser_signs_in_and_out_and_lends_its_key_to_no_other_site(app_url: str) -> None:
    browser = httpx.Client(base_url=app_url)
    for headers in ({}, {"authorization": "Bearer rl-wrong"}):
        refused = browser.post("/sign-in", headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"], dict(browser.cookies)) == (401, "Bearer", {})
    answer = browser.post("/sign-in", headers=bearer("alice"))
    told = answer.headers["set-cookie"]
    assert (answer.status_code, answer.json()) == (200, {"admin": False})
    assert {"HttpOnly", "Path=/", "SameSite=strict", "Max-Age=2592000"} <= set(told.split("; "))
    assert "Secure" not in told
    behind_tls = browser.post("/sign-in", headers=bearer("alice") | {"x-forwarded-proto": "https"})
    assert "; Secure" in behind_tls.headers["set-cookie"]
    key = {"cookie": f"other=1; raylens_key={KEYS['alice']}"}
    for site, status in (("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)):
        response = httpx.get(f"{app_url}/v1/models", headers={**key, "sec-fetch-site": site})
        assert response.status_code == status, site
    response = httpx.get(f"{app_url}/v1/models", headers={**bearer("alice"), "sec-fetch-site": "cross-site"})
    assert response.status_code == 200
    wrong_first = httpx.get(f"{app_url}/v1/models", headers={**key, "authorization": "Bearer rl-wrong"})
    assert wrong_first.status_code == 401
    out = httpx.post(f"{app_url}/sign-out", headers={"cookie": "raylens_key=rl-revoked"})
    assert out.status_code == 204
    assert "Max-Age=0" in out.headers["set-cookie"]


def test_a_reader_signs_in_keeps_the_question_when_the_key_goes_and_signs_out(
    app_url: str, keys_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(encoded(disc("red", (96, 96), (36, 36))))
    with chromium() as browser:
        page = browser.new_page()
        page.goto(app_url)
        form = page.get_by_role("dialog", name="Sign in")
        expect(form).to_contain_text("This server takes an API key.")
        for key, complaint in (("rl-nobody", "does not know this key"), ("schlüssel", "of ASCII only")):
            form.get_by_label("API key").fill(key)
            form.get_by_role("button", name="Sign in").click()
            expect(form).to_contain_text(complaint)
        form.get_by_label("API key").fill(KEYS["bob"])
        form.get_by_label("API key").press("Enter")
        expect(form).to_be_hidden()
        expect(page.locator("#model")).to_have_text("shapes")
        page.reload()
        expect(page.locator("#model")).to_have_text("shapes")
        expect(form).to_be_hidden()
        pick(page, file)
        assert ask(page, "What colour is the circle?") == "red"
        try:
            write_keys(keys_file, {name: key for name, key in KEYS.items() if name != "bob"})
            wait_until(lambda: httpx.get(f"{app_url}/v1/models", headers=bearer("bob")).status_code == 401)
            send(page, "And its shape?")
            expect(form).to_contain_text("does not take your API key any more")
            expect(page.locator("article.failed .problem")).to_contain_text("You are not signed in")
        finally:
            write_keys(keys_file, KEYS)
            wait_until(lambda: httpx.get(f"{app_url}/v1/models", headers=bearer("bob")).status_code == 200)
        form.get_by_label("API key").fill(KEYS["bob"])
        form.get_by_label("API key").press("Enter")
        expect(form).to_be_hidden()
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(".measures")).to_have_count(2)
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Sign out").click()
        expect(form).to_contain_text("This server takes an API key.")
        assert page.context.cookies() == []


def test_a_changed_file_of_keys_counts_within_seconds(app_url: str, keys_file: Path) -> None:
    write_keys(keys_file, {**KEYS, "erin": "rl-erin"})
    wait_until(lambda: httpx.get(f"{app_url}/v1/models", headers={"authorization": "Bearer rl-erin"}).is_success)
    write_keys(keys_file, KEYS)
    wait_until(lambda: not httpx.get(f"{app_url}/v1/models", headers={"authorization": "Bearer rl-erin"}).is_success)


def test_tenants_do_not_see_each_others_files(app_url: str) -> None:
    alice, bob = client_of(app_url, "alice"), client_of(app_url, "bob")
    picture = encoded(disc("red", (96, 96), (36, 36)))
    file = alice.files.create(file=("red.png", picture), purpose="vision")
    assert alice.files.content(file.id).read() == picture
    assert [one.id for one in alice.files.list()] == [file.id]
    assert file.id not in [one.id for one in bob.files.list()]
    part: Any = {"type": "input_image", "file_id": file.id}
    for act in (
        lambda: bob.files.retrieve(file.id),
        lambda: bob.files.content(file.id),
        lambda: bob.files.delete(file.id),
        lambda: bob.chat.completions.create(model="shapes", messages=[{"role": "user", "content": [part]}]),
    ):
        with pytest.raises(NotFoundError):
            act()
    alice.files.delete(file.id)
    assert alice.files.list().data == []


def test_tenants_do_not_see_each_others_responses(app_url: str) -> None:
    alice, bob = client_of(app_url, "alice"), client_of(app_url, "bob")
    said = alice.responses.create(model="shapes", input="Who are you?")
    for act in (
        lambda: bob.responses.retrieve(said.id),
        lambda: bob.responses.delete(said.id),
        lambda: bob.responses.cancel(said.id),
        lambda: bob.responses.input_items.list(said.id),
    ):
        with pytest.raises(NotFoundError):
            act()
    with pytest.raises(BadRequestError, match="no response"):
        bob.responses.create(model="shapes", input="And?", previous_response_id=said.id)
    assert alice.responses.retrieve(said.id).output_text == said.output_text


def test_tenants_do_not_see_each_others_batches(app_url: str) -> None:
    alice, bob = client_of(app_url, "alice"), client_of(app_url, "bob")
    request = {"custom_id": "a", "url": "/v1/completions", "body": {"model": "shapes", "prompt": "Hi", "max_tokens": 2}}
    file = alice.files.create(file=("in.jsonl", json.dumps(request).encode()), purpose="batch")
    fields: Any = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = alice.batches.create(**fields)
    wait_until(lambda: alice.batches.retrieve(batch.id).status == "completed")
    output = alice.batches.retrieve(batch.id).output_file_id
    assert output is not None
    assert bob.batches.list().data == []
    for act in (
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(**fields),
        lambda: bob.files.content(output),
    ):
        with pytest.raises(NotFoundError):
            act()
    assert json.loads(alice.files.content(output).read())["response"]["status_code"] == 200
    for one in (output, file.id):
        alice.files.delete(one)


@contextmanager
def long_stream(client: OpenAI) -> Iterator[None]:
    """An answer that goes on until the block ends."""
    stream = hello(client, stream=True, max_tokens=LONG, extra_body={"ignore_eos": True})
    next(iter(stream))
    stop = threading.Event()

    def read() -> None:
        for _ in stream:
            if stop.is_set():
                return

    reader = threading.Thread(target=read)
    reader.start()
    yield
    stop.set()
    reader.join()
    stream.close()


def test_a_key_waits_for_its_own_requests_and_not_for_others(app_url: str) -> None:
    alice, bob = client_of(app_url, "alice"), client_of(app_url, "bob")
    rejections = exported_rejections(app_url)
    with long_stream(alice):
        assert hello(bob).choices[0].message.content
        with pytest.raises(RateLimitError, match=r"no room after 1.5 s in the queue, try again in \d+ s") as caught:
            hello(alice)
    assert caught.value.code == "overloaded_queue_seconds"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    # The official client comes again by itself.
    with ThreadPoolExecutor(4) as pool:
        patient = alice.with_options(max_retries=10)
        answers = list(pool.map(lambda _: hello(patient).choices[0].message.content, range(8)))
    assert len(set(answers)) == 1
    wait_until(lambda: exported_rejections(app_url) > rejections)


def exported_rejections(app_url: str) -> float:
    return exported(app_url, "admission_rejections", headers=bearer(ADMIN), reason="queue_seconds")


def test_a_lower_priority_passes_by_a_key_s_higher_one_in_the_engine_too(app_url: str) -> None:
    order = []

    def answer(name: str, priority: int) -> None:
        hello(client_of(app_url, name), max_tokens=20, extra_body={"priority": priority, "ignore_eos": True})
        order.append(name)

    with ThreadPoolExecutor(2) as pool, long_stream(client_of(app_url, "alice")):
        with long_stream(client_of(app_url, "carol")):  # the engine's two places are taken
            first = pool.submit(answer, "bob", 0)
            time.sleep(0.5)
            second = pool.submit(answer, "dave", 4)
            time.sleep(0.5)
            assert order == []
        first.result()
        second.result()
    assert order == ["dave", "bob"]


class Health(Background):
    """Asks for the health again and again and notes how many seconds each answer takes."""

    def __init__(self, url: str) -> None:
        super().__init__(self._run)
        self._url = url
        self.times: list[float] = []

    def _run(self) -> None:
        with httpx.Client() as client:
            while not self.is_over.wait(0.02):
                started = time.perf_counter()
                assert client.get(f"{self._url}/health", timeout=10).status_code == 200
                self.times.append(time.perf_counter() - started)


def resident_bytes() -> int:
    """Of the endpoint's processes: the one that speaks HTTP and the one with the routes."""
    pids = [*replica_pids("Ingress"), *proxy_pids()]
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)


def test_bodies_of_100_megabytes_take_no_memory(app_url: str) -> None:
    """Refused by what they claim, or as soon as they have become too large; health goes on meanwhile."""
    assert proxy_pids()
    before = resident_bytes()
    most = [before]

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            most[0] = max(most[0], resident_bytes())
            yield b"x" * MIB

    def send(is_chunked: bool) -> int:
        content: Any = chunks() if is_chunked else b"x" * (100 * MIB)
        try:
            url = f"{app_url}/v1/chat/completions"
            return httpx.post(url, content=content, headers=bearer("bob"), timeout=20).status_code
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            return 413  # the connection was closed before all was sent

    with Health(app_url) as health, ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(send, [False, True] * 4))
    assert set(statuses) <= {408, 413, 429}, "too slow, too large, or no room for its bytes"
    assert most[0] - before < 600 * MIB
    assert len(health.times) > 10


def test_a_body_that_trickles_in_is_given_up(app_url: str) -> None:
    started = time.monotonic()
    with connected(app_url, f"Authorization: Bearer {KEYS['bob']}\r\nContent-Length: 1000\r\n") as connection:
        answer = b""
        connection.settimeout(0.2)
        while b"body_timeout" not in answer and time.monotonic() - started < 20:
            try:
                connection.sendall(b" ")
                answer += connection.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
    assert b" 408 " in answer
    assert b"limit for all of them" in answer
    assert BODY_TIMEOUT_S - 0.5 < time.monotonic() - started < BODY_TIMEOUT_S + 5
    assert hello(client_of(app_url, "bob")).choices[0].message.content


def test_a_request_heavier_than_its_budget_is_refused_by_name(app_url: str) -> None:
    message = user_message("Hi")
    message["content"] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{huge_header(number)}"}}
        for number in range(4)  # equal ones would count once
    ]
    body = {"model": "shapes", "messages": [message]}
    response = httpx.post(f"{app_url}/v1/chat/completions", json=body, headers=bearer("carol"))
    assert response.status_code == 413
    message = response.json()["error"]["message"]
    assert "needs 200000000 pixels, the limit of this API key together is 100000000" in message
    response = httpx.post(
        f"{app_url}/v1/chat/completions",
        json={"model": "shapes", "messages": [user_message("Hi")], "max_tokens": 10**6, "n": 2},
        headers=bearer("carol"),
    )
    assert "tokens" in response.json()["error"]["message"]


def huge_header(number: int) -> str:
    """The first bytes of a PNG that claims more pixels than one may have."""
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (20_000).to_bytes(4) + (20_000).to_bytes(4) + b"\x08\x02\0\0\0"
    return base64.b64encode(header + b"\0" * 6 + bytes([number])).decode()
