"""HAProxy with the configuration that Ray Serve writes and `raylens-haproxy` rewrites, in front of a small server."""

import asyncio
import http.client
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ray.serve._private import haproxy as ray_haproxy
from ray.serve.config import HTTPOptions

from raylens.deployments.cluster.haproxy import ERROR_PAGES, WAITING_PAGE, haproxy_environment
from raylens.deployments.cluster.private_files import private_folder
from raylens.deployments.free_port import free_port
from raylens.deployments.ray_internals.haproxy_config import (
    HEADER_SECONDS,
    ConnectionLimits,
    UnknownConfigurationError,
    rewrite,
)
from tests.listening import is_refused_to_nobody
from tests.waiting import until, wait_until

MAX_CONNECTIONS = 30  # so that a few are a crowd
MAX_OPEN_FILES = 10_000
LIMITS = ConnectionLimits.within(MAX_CONNECTIONS, MAX_OPEN_FILES)
PAUSE_SECONDS = HEADER_SECONDS + 2


LEFT: list[str] = []
"""The paths of POST requests whose client has left."""


class Backend(BaseHTTPRequestHandler):
    """Answers GET at once; at /slow, with a pause in the middle of the answer; at /silent, after one.

    It waits until the client of a POST leaves; at /half, after half of the answer; at /silent, POST is like GET; at
    /refused, it answers before it has read the body, and closes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/silent":
            time.sleep(PAUSE_SECONDS)
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"go")
        if self.path == "/slow":
            time.sleep(PAUSE_SECONDS)
        self.wfile.write(b"od")

    def do_POST(self) -> None:
        if self.path == "/silent":
            self.do_GET()
            return
        if self.path == "/refused":
            time.sleep(0.02)
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)  # it closes behind an error
            return
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/half"):
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"go")
        with suppress(ConnectionResetError):
            assert self.rfile.read(1) == b""
        LEFT.append(self.path)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def backend_port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Backend) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def folder() -> Iterator[Path]:
    with private_folder() as found:
        yield found


@pytest.fixture
async def api(
    folder: Path, backend_port: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ray_haproxy.HAProxyApi]:
    """HAProxy as Ray starts it, with a server behind it and one that is not there: at /away."""
    environment = haproxy_environment(folder)
    monkeypatch.setenv("RAYLENS_HTTP_HOST", "127.0.0.2")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
    binary = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    monkeypatch.setattr(ray_haproxy, "RAY_SERVE_HAPROXY_BINARY_PATH", binary)
    api = make_api(folder, free_port())
    api.set_backend_configs(
        {
            name: ray_haproxy.BackendConfig(
                name=name,
                path_prefix=path,
                app_name=name,
                http_health_check_path="/",
                servers=[ray_haproxy.ServerConfig(name="server", host="127.0.0.1", port=server_port)],
            )
            for name, path, server_port in (("app", "/", backend_port), ("away", "/away", free_port()))
        }
    )
    await api.start()
    yield api
    await api.stop()


@pytest.fixture
def port(api: ray_haproxy.HAProxyApi) -> int:
    found: int = api.cfg.frontend_port
    return found


def make_api(folder: Path, port: int) -> ray_haproxy.HAProxyApi:
    config = ray_haproxy.HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        maxconn=MAX_CONNECTIONS,
        hard_stop_after_s=2,  # which is too short for /slow
        socket_path=str(folder / "admin.sock"),
        metrics_socket_path=str(folder / "metrics.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        is_head=True,
    )
    return ray_haproxy.HAProxyApi(config, config_file_path=str(folder / "haproxy.cfg"))


def get(port: int, path: str = "/") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.2", port, timeout=PAUSE_SECONDS * 2)
    with closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def connect(port: int, address: str = "127.0.0.1") -> socket.socket:
    """A connection that comes from `address`."""
    return socket.create_connection(("127.0.0.2", port), timeout=PAUSE_SECONDS * 2, source_address=(address, 0))


def answer_to(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    answer = b""
    try:
        while data := connection.recv(65536):
            answer += data
    except ConnectionResetError:
        pass
    return answer


def is_closed_at_once(port: int, address: str) -> bool:
    try:
        with connect(port, address) as connection:
            return answer_to(connection) == b""
    except ConnectionResetError:  # before the connection is even known here
        return True


def send(port: int, request: bytes, *, half_close: bool = False) -> bytes:
    with connect(port) as connection:
        connection.sendall(request)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return answer_to(connection)


def error_in(answer: bytes) -> dict[str, str | None]:
    """What an answer in OpenAI's form says."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    error: dict[str, str | None] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def good_answer(connection: socket.socket) -> bytes:
    answer = b""
    while not answer.endswith(b"good"):
        answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")
    return answer


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


# What gets through


async def test_requests_pass_where_the_endpoint_listens_and_nowhere_else(port: int) -> None:
    assert get(port)[::2] == (200, b"good")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.slow
async def test_a_change_of_the_servers_behind_it_cuts_no_answer(api: ray_haproxy.HAProxyApi, port: int) -> None:
    """Ray then starts another HAProxy, which takes the place of the first."""
    with ThreadPoolExecutor() as pool, connect(port) as silent:
        pausing = pool.submit(get, port, "/slow")
        time.sleep(0.5)
        before = api._proc
        await api.reload()
        assert api._proc is not before
        silent.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert good_answer(silent)
        assert pausing.result()[::2] == (200, b"good")


async def test_while_the_servers_behind_it_change_everybody_is_answered(api: ray_haproxy.HAProxyApi, port: int) -> None:
    ends = threading.Event()

    def ask() -> int:
        number = 0
        while not ends.is_set():
            assert get(port)[0] == 200
            number += 1
        return number

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            for _ in range(3):
                await api.reload()
        finally:
            ends.set()
        assert all(one.result() > 10 for one in asking)


# Errors are OpenAI's


async def test_who_is_not_there_is_not_available(port: int) -> None:
    status, headers, _ = get(port, "/away")
    assert (status, headers["content-type"], headers["retry-after"]) == (503, "application/json", "2")
    assert error_in(send(port, b"GET /away HTTP/1.1\r\nHost: x\r\n\r\n"))["code"] == "endpoint_unavailable"


async def test_a_chunk_that_is_none_is_the_clients_mistake(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"POST /silent HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        time.sleep(0.2)
        connection.sendall(b"nonsense\r\n")
        answer = answer_to(connection)
    assert (status_of(answer), error_in(answer)["code"]) == (400, "invalid_http")


async def test_a_client_that_closes_its_half_gets_an_error_in_the_same_form(port: int) -> None:
    answer = send(port, b"GET /silent HTTP/1.1\r\nHost: x\r\n\r\n", half_close=True)
    assert (status_of(answer), error_in(answer)["type"]) == (400, "invalid_request_error")


async def test_without_an_application_it_is_not_available(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the first is deployed."""
    program = haproxy_environment(folder)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", program)
    monkeypatch.setattr(ray_haproxy, "RAY_SERVE_HAPROXY_BINARY_PATH", program)
    api = make_api(folder, free_port())
    await api.start()
    connection = http.client.HTTPConnection("127.0.0.1", api.cfg.frontend_port)
    with closing(connection):
        connection.request("GET", "/health")
        response = connection.getresponse()
        assert (response.status, response.getheader("retry-after")) == (503, "2")
        assert json.loads(response.read())["error"]["code"] == "endpoint_unavailable"
        connection.request("GET", "/", headers={"Accept": "text/html,*/*"})
        response = connection.getresponse()
        assert (response.status, response.read().decode()) == (503, WAITING_PAGE)
    await api.stop()


@pytest.mark.parametrize("lines", [[b"x-%d: y" % n for n in range(1500)], [b"x: " + b"y" * 50_000]])
async def test_the_endpoint_is_told_of_more_headers_than_it_takes(port: int, lines: list[bytes]) -> None:
    answer = send(port, b"\r\n".join([b"GET / HTTP/1.1", b"Host: x", b"Connection: close", *lines, b"", b""]))
    assert status_of(answer) in (200, 431), "not refused by HAProxy, whose page would be HTML"


def test_it_ends_with_the_process_that_started_it(folder: Path) -> None:
    ray_config(folder)
    program = haproxy_environment(folder)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    code = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, program, "-db", "-f", str(folder / "haproxy.cfg")]
    environment = os.environ | {"RAY_SERVE_HAPROXY_BINARY_PATH": program}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        haproxy = Path(f"/proc/{int(starter.stdout.readline())}")
        wait_until(lambda: (haproxy / "comm").read_text() == "haproxy\n")
        starter.kill()
    wait_until(lambda: not haproxy.exists())


async def test_what_is_no_http_is_refused_and_the_connection_closed(port: int) -> None:
    assert status_of(send(port, b"nonsense\r\n\r\n")) == 400


# Who is let in, and who is let go


async def test_a_client_whose_body_is_refused_is_let_go_in_the_middle_of_it(port: int) -> None:
    """One that sends without looking for the answer, as many clients do."""
    head = b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"

    def push() -> bytes:
        with connect(port) as connection:
            connection.settimeout(5)
            connection.sendall(head)
            with suppress(ConnectionError):
                while True:
                    connection.sendall(b"x" * 65536)
            return answer_to(connection)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: push(), range(40)))
    assert all(status_of(answer) == 413 for answer in answers if answer)


@pytest.mark.slow
async def test_headers_that_do_not_come_are_given_up_but_an_answer_may_pause_for_longer(port: int) -> None:
    with ThreadPoolExecutor() as pool, connect(port) as silent, connect(port) as slow:
        pausing = pool.submit(get, port, "/slow")
        started = time.monotonic()
        slow.sendall(b"GET / HTTP/1.1\r\nHost:")
        assert status_of(answer_to(slow)) == 408
        assert answer_to(silent)[:12] in (b"", b"HTTP/1.1 408")
        assert HEADER_SECONDS - 1 < time.monotonic() - started < HEADER_SECONDS + 3
        assert pausing.result()[::2] == (200, b"good")


async def test_one_address_takes_a_part_of_the_connections_only(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(LIMITS.per_address):
            stack.enter_context(connect(port, "127.0.0.7"))
        time.sleep(0.2)
        assert is_closed_at_once(port, "127.0.0.7")
        assert get(port)[0] == 200, "another address is served"


async def test_in_a_crowd_idle_connections_make_room(port: int) -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(port, f"127.0.0.{10 + n % 3}")) for n in range(LIMITS.crowded + 1)]
        for connection in connections:
            connection.sendall(request)
        answers = [good_answer(connection) for connection in connections]
        assert any(b"\r\nconnection: close\r\n" in answer.lower() for answer in answers)
    with connect(port) as alone:
        for _ in range(2):  # where there is room a connection serves again
            alone.sendall(request)
            assert b"connection: close" not in good_answer(alone).lower()


# What it opens beside


async def test_its_sockets_are_its_owners(port: int, folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "admin.sock").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
async def test_another_user_reaches_none_of_them(port: int, folder: Path) -> None:
    assert is_refused_to_nobody(partial(os.listdir, folder))
    for name in ("admin.sock", "haproxy.cfg"):
        assert is_refused_to_nobody(partial(os.stat, folder / name))
    with socket.socket(socket.AF_UNIX) as connection:
        assert is_refused_to_nobody(lambda: connection.connect(str(folder / "admin.sock")))


# The configuration


def ray_config(folder: Path) -> str:
    api = make_api(folder, 8000)
    api._generate_config_file_internal()
    return (folder / "haproxy.cfg").read_text()


def rewritten(config: str) -> str:
    return rewrite(config, max_open_files=MAX_OPEN_FILES, host=None, pages={}, waiting_page=Path("waiting.html"))


def test_nothing_else_listens(folder: Path) -> None:
    config = ray_config(folder)
    assert "\nlisten stats" in config
    assert "\nfrontend prometheus" in config
    new = rewritten(config)
    binds = [line.strip() for line in new.splitlines() if line.strip().startswith("bind ")]
    assert binds == ["bind 127.0.0.1:8000"]


def test_another_configuration_than_rays_is_refused(folder: Path) -> None:
    config = ray_config(folder)
    for known, other in (("mode 666", "mode 660"), ("frontend http_frontend", "frontend web"), ("maxconn ", "conns ")):
        with pytest.raises(UnknownConfigurationError):
            rewritten(config.replace(known, other))


def test_connections_are_as_many_as_the_process_may_have_files_for() -> None:
    assert ConnectionLimits.within(8192, 1_000_000) == ConnectionLimits(total=8192, per_address=5461, crowded=4096)
    assert ConnectionLimits.within(8192, 4096).total == 1792
    assert ConnectionLimits.within(8192, 64).total == 16


def test_every_error_page_says_how_long_it_is() -> None:
    for page in ERROR_PAGES.values():
        head, _, body = page.partition("\r\n\r\n")
        assert f"Content-Length: {len(body.encode())}\r\n" in head + "\r\n"


@pytest.mark.parametrize("path", ["/unanswered", "/half"])
@pytest.mark.parametrize("num_bytes", [100, 50_000, 1_000_000])
async def test_a_client_that_leaves_has_left_the_server_too(port: int, path: str, num_bytes: int) -> None:
    """Most clients send the headers and the body of a request one after the other."""
    path = f"{path}?{num_bytes}"
    with connect(port) as connection:
        headers = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {num_bytes}\r\n\r\n"
        connection.sendall(headers.encode())
        await asyncio.sleep(0.05)
        connection.sendall(b"x" * num_bytes)
        await asyncio.sleep(0.5)
    await until(lambda: path in LEFT)
