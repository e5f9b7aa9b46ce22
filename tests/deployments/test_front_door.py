"""The running endpoint as strangers find it: what listens, what they may touch, and questions that need no key."""

import itertools
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from PIL import Image

from raylens.deployments.cluster.other_users import MOST
from raylens.preprocess.data_url import data_url
from tests.listening import (
    connections_of_nobody,
    documented,
    is_refused_to_nobody,
    listeners,
    server_folder,
    sockets_open_to_nobody,
    undocumented,
)
from tests.metric_values import exported
from tests.pictures import disc, encoded
from tests.replicas import replica_pids
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
NUM_SLOW = 4200
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


def test_only_what_is_documented_listens(app_url: str) -> None:
    found = listeners(os.getpid())
    assert {one.port for one in found} >= {urlsplit(app_url).port}
    assert undocumented(found) == []
    # Nothing in the table is made up, but for ranks, which this server has none of.
    for pattern, address in documented():
        is_there = any(one.is_like(pattern, address) for one in found)
        assert is_there or pattern in ("ray::GenerateRank", "raylens"), (pattern, address)


def test_calls_between_replicas_ask_for_the_token(app_url: str) -> None:
    ports = {one.port for one in listeners(os.getpid()) if one.address == "every address"}
    assert ports
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_files_are_the_servers_own(app_url: str) -> None:
    folder = server_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((Path.home() / ".ray" / "auth_token").stat().st_mode) == 0o600
    assert list(folder.glob("*/admin.sock"))
    assert list(folder.glob("uploads-*"))


@needs_root
def test_another_user_reaches_none_of_its_sockets(app_url: str) -> None:
    assert sockets_open_to_nobody() == []
    assert is_refused_to_nobody(lambda: (Path.home() / ".ray" / "auth_token").read_text())


@needs_root
def test_another_user_keeps_few_connections_to_a_process(app_url: str) -> None:
    (ingress,) = replica_pids("Ingress")
    ports = [one.port for one in listeners(os.getpid()) if one.process == "ray::ServeReplica:raylens:Ingress"]

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{ingress}/fd"))

    before = descriptors()
    with connections_of_nobody(ports * 500) as num_closed:
        wait_until(lambda: num_closed() >= len(ports) * (500 - MOST - 10))
        wait_until(lambda: descriptors() <= before + len(ports) * (MOST + 10))
        assert httpx.get(f"{app_url}/v1/models", timeout=10).status_code == 200


@pytest.mark.slow
@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv, of Debian's util-linux")
def test_another_user_may_start_a_server_beside_it(app_url: str, tmp_path: Path) -> None:
    """He reads the files of this checkout, wherever they are, and writes none of the first one's."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    os.chmod(tmp_path, 0o755)
    start = "from raylens.deployments.launch.local_cluster import *\n"
    start += "with local_ray(host='127.0.0.1', port=free_port(), num_cpus=1): 1"
    reads = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    result = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *reads, sys.executable, "-c", start],
        cwd=ROOT,
        env={"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert stat.S_IMODE((home / ".ray" / "auth_token").stat().st_mode) == 0o600


@pytest.mark.slow
def test_thousands_of_slow_headers_do_not_stop_the_endpoint(app_url: str) -> None:
    to = urlsplit(app_url)
    with ExitStack() as stack:
        for _ in range(NUM_SLOW):
            connection = stack.enter_context(socket.create_connection((to.hostname, to.port or 80)))
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
        slowest, deadline = 0.0, time.monotonic() + 12
        while time.monotonic() < deadline:
            started = time.monotonic()
            assert httpx.get(f"{app_url}/health", timeout=5).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.1)
        assert connection.recv(100).startswith(b"HTTP/1.1 408"), "it had its time"
    assert slowest < 1


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_by_each_name_and_method(app_url: str, path: str) -> None:
    assert httpx.get(app_url + path).json()["ready"]
    head = httpx.head(app_url + path)
    assert (head.status_code, head.content) == (200, b"")


def test_version_and_context_are_told(app_url: str) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", httpx.get(f"{app_url}/version").json()["version"])
    (model,) = httpx.get(f"{app_url}/v1/models").json()["data"]
    assert (model["max_model_len"], model["modalities"]) == (2048, ["image"])


def test_many_headers_are_refused_in_the_same_form(app_url: str) -> None:
    response = httpx.get(f"{app_url}/v1/models", headers={f"x-{number}": "y" for number in range(200)})
    assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("value", [b"\xff", b"0.001", b"?1", b"a b!"])
def test_headers_of_ray_serve_change_nothing(app_url: str, value: bytes) -> None:
    names = ("serve-multiplexed-model-id", "x-request-disconnect-disabled", "x-request-timeout-seconds", "x-session-id")
    headers = {name.encode(): value for name in (*names, "x-request-id", "traceparent")}
    body = {"model": "shapes", "prompt": "Hello", "max_tokens": 50, "ignore_eos": True}
    (log,) = server_folder().rglob("server.log")
    read = log.stat().st_size
    answer = httpx.post(f"{app_url}/v1/completions", json=body, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 50)
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
    wait_until(lambda: answer.headers["x-request-id"] in log.read_bytes()[read:].decode())


def test_no_header_makes_the_server_go_on_for_who_has_left(app_url: str) -> None:
    body = {"model": "shapes", "prompt": ["Hello"] * 8, "max_tokens": 1900, "ignore_eos": True}
    before = exported(app_url, "generation_tokens")
    headers = {"x-request-disconnect-disabled": "?1"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{app_url}/v1/completions", json=body, headers=headers, timeout=httpx.Timeout(10, read=0.5))
    made = 0.0
    while (now := exported(app_url, "generation_tokens") - before) > made:
        made = now
    assert 0 < made < 8 * 1900 / 2


def test_what_body_validation_refuses_is_counted(app_url: str) -> None:
    def count() -> float:
        return exported(app_url, "request_errors", stage="ingress", code="invalid_value")

    before = count()
    body: dict[str, Any] = {"model": "shapes", "messages": [{"role": "nobody", "content": "Hi"}]}
    assert httpx.post(f"{app_url}/v1/chat/completions", json=body).status_code == 400
    wait_until(lambda: count() == before + 1)


def test_a_hostile_grammar_is_its_clients_mistake(app_url: str) -> None:
    """The kinds of them are in tests/llm/test_grammar_check.py."""
    optional = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}
    forms: list[tuple[str, Any]] = [
        ("json", {"$ref": "#"}),
        ("json", optional),
        ("grammar", "start: start"),
        ("grammar", 'start: "a"~1000000'),
        ("json", {"type": "integer", "multipleOf": 1_000_003}),
        ("regex", "((a{1,300}){1,300}){1,300}"),
    ]
    (log,) = server_folder().rglob("server.log")
    before, read = exported(app_url, "request_errors", stage="generate"), log.stat().st_size
    for is_stream, (name, value) in itertools.product((False, True), forms):
        body = {"model": "shapes", "messages": [{"role": "user", "content": "Hi"}], "stream": is_stream}
        url = f"{app_url}/v1/chat/completions"
        answer = httpx.post(url, json={**body, "structured_outputs": {name: value}}, timeout=60)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", f"structured_outputs.{name}")
    wait_until(lambda: answer.headers["x-request-id"] in log.read_bytes()[read:].decode())
    assert "Traceback" not in log.read_bytes()[read:].decode()
    assert exported(app_url, "request_errors", stage="generate") == before


@pytest.mark.slow
def test_large_pictures_hold_up_no_small_one_and_leave_no_memory_behind(app_url: str) -> None:
    def ask(picture: Image.Image) -> int:
        url = data_url(encoded(picture, "WEBP"), "image/webp")
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "shapes", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return httpx.post(f"{app_url}/v1/chat/completions", json=body, timeout=120).status_code

    def resident() -> int:
        """Bytes of the one that takes most."""
        pids = replica_pids("Preprocess")
        return max(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") for pid in pids)

    assert ask(disc("red", corner=(5, 5))) == 200
    before = resident()
    with ThreadPoolExecutor(8) as clients:
        large = [clients.submit(ask, Image.new("RGB", (7000, 6990 + number))) for number in range(6)]
        wait_until(lambda: any(one.done() for one in large), 60)
        assert clients.submit(ask, disc("blue", corner=(9, 9))).result() == 200
        assert sum(one.done() for one in large) < 5
        assert [one.result() for one in large] == [200] * 6
    assert resident() < before + 150e6
