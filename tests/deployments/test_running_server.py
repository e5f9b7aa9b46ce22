"""What the commands that look at a running server say where it does not tell them anything."""

import argparse
import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from raylens.deployments.operator.running_server import KEY_VARIABLE, NoAnswerError, RunningServer, add_server_options
from tests.stub_server import Answer, StubServer

PATH = "/metrics"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def named(*arguments: str) -> RunningServer:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    return RunningServer.named_by(parser.parse_args(arguments))


def refused(status: int, message: str) -> Answer:
    return Answer(json.dumps({"error": {"message": message}}).encode(), status)


def why_not(url: str, *arguments: str) -> str:
    with pytest.raises(NoAnswerError) as raised:
        named("--url", url, *arguments).get(PATH)
    return str(raised.value).replace(url, "URL")


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://10.0.0.1:8000/", "http://10.0.0.1:8000/v1/"])
def test_the_api_s_address_does_as_well(url: str) -> None:
    assert named("--url", url).url == "http://10.0.0.1:8000"


def test_without_an_address_it_is_the_server_of_this_machine() -> None:
    assert named().url == "http://127.0.0.1:8000"


@pytest.mark.parametrize("url", ["localhost:8000", "nonsense", "http://", "ftp://10.0.0.1", "http://[::1"])
def test_what_is_no_address_is_refused_at_once(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        named("--url", url)
    assert "argument --url" in capsys.readouterr().err


def test_the_key_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer(lambda path, headers: Answer(str(headers.get("authorization")).encode())) as server:
        assert named("--url", server.url).get(PATH) == "None"
        monkeypatch.setenv(KEY_VARIABLE, "")
        assert named("--url", server.url).get(PATH) == "None"
        monkeypatch.setenv(KEY_VARIABLE, "rl-one")
        assert named("--url", server.url).get(PATH) == "Bearer rl-one"
        assert named("--url", server.url, "--api-key", "rl-two").get(PATH) == "Bearer rl-two"


def test_a_key_does_not_follow_to_another_server() -> None:
    def redirect(path: str, headers: dict[str, str]) -> Answer:
        assert headers["authorization"] == "Bearer rl-admin"
        return Answer(b"", 302, {"location": f"{other.url}/x"})

    with (
        StubServer(lambda path, headers: Answer(str(headers.get("authorization")).encode())) as other,
        StubServer(redirect) as server,
    ):
        assert named("--url", server.url, "--api-key", "rl-admin").get(PATH) == "None"


@pytest.mark.parametrize("key", ["ключ", "rl-one\n"])
def test_a_key_that_no_request_can_carry_is_told(key: str) -> None:
    with pytest.raises(NoAnswerError, match="the API key has characters that no API key has"):
        named("--api-key", key)


@pytest.mark.parametrize(
    ("answer", "key", "reason"),
    [
        (refused(401, "no API key was sent"), "", f"URL wants an API key: set {KEY_VARIABLE}, or give --api-key"),
        (refused(401, "the API key is not valid"), "rl-x", "URL refuses: the API key is not valid"),
        (refused(403, "the API key is not an admin's"), "rl-x", "URL refuses: the API key is not an admin's"),
        (refused(404, "no request 'r' of this key"), "", "URL: no request 'r' of this key"),
        (refused(503, "Encode has no replica"), "", "URL: Encode has no replica"),
        (Answer(b"<html>", 503), "", f"URL{PATH} answers 503 Service Unavailable"),
        (Answer(b'{"error": "none"}', 404), "", f"URL{PATH} answers 404 Not Found"),
        (Answer(b"", 302, {"location": "file:///etc/passwd"}), "", f"URL{PATH} answers 302 Found"),
    ],
)
def test_a_refusal_is_told_in_the_server_s_words(answer: Answer, key: str, reason: str) -> None:
    with StubServer(lambda path, headers: answer) as server:
        told = why_not(server.url, "--api-key", key)
    assert told.partition(" - ")[0] == reason


@pytest.fixture
def speaking() -> Iterator[Callable[[bytes], str]]:
    """Starts a server that says these bytes to one client, whatever it asks, and hangs up. Returns its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def say(words: bytes) -> str:
            def answer() -> None:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(words)

            threading.Thread(target=answer, daemon=True).start()
            return f"http://127.0.0.1:{listening.getsockname()[1]}"

        yield say


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"", "remote end closed connection without response"),
        (b"SSH-2.0-OpenSSH\r\n", "ssh-2.0-openssh"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "incompleteread(1 bytes read, 8 more expected)"),
    ],
)
def test_what_does_not_speak_http_is_told(speaking: Callable[[bytes], str], words: bytes, reason: str) -> None:
    assert why_not(speaking(words)) == f"URL does not answer: {reason}"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1", "connection refused"),
        ("http://127.0.0.1:x", "nonnumeric port: 'x'"),
        ("http://a..b", ""),  # each version of Python has its own words for it
    ],
)
def test_a_server_that_is_not_there_is_told(url: str, reason: str) -> None:
    assert why_not(url).startswith(f"URL does not answer: {reason}")
