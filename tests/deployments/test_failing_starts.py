"""A server that cannot start says so in one line before it starts Ray, within three seconds."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

RAYLENS = Path(sys.executable).with_name("raylens")
_CPU_SECONDS = 3.0
"""Of the process. The time on the clock also depends on the other processes of the machine."""


def refusal(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Returns the only line of a `raylens serve` that fails."""
    command = [str(RAYLENS), "serve", "--port", "0", "--device", "cpu", *arguments]
    before = os.times()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | dict(environment or {})
    ) as process:
        try:
            output, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < _CPU_SECONDS
    assert (process.returncode, output) == (2, ""), errors
    assert re.fullmatch(r"raylens: .*\n", errors), errors
    return str(errors.removeprefix("raylens: ").rstrip())


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_off(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)


def without_a_shard(folder: Path) -> None:
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def of_type(model_type: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "model_type": model_type}))

    return change


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (without_config, [], r"no readable config\.json with a model_type in it: .* in Hugging Face format"),
        (without_weights, [], r"model\.safetensors is missing; copy or download the checkpoint again"),
        (cut_off, [], r"model\.safetensors is cut off or damaged: .*; copy or download the checkpoint again"),
        (
            without_a_shard,
            [],
            r"model-00001-of-00002\.safetensors is missing, .*; copy or download the checkpoint again",
        ),
        (of_type("nonsense"), [], r"model_type 'nonsense' is not supported; docs/models\.md lists the models"),
        (of_type("bert"), [], r"model_type 'bert' is not supported; docs/models\.md lists the models"),
    ],
)
def test_a_broken_checkpoint(
    change: Callable[[Path], None], arguments: list[str], message: str, shapes: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(shapes, tmp_path / "model"))
    change(folder)
    assert re.fullmatch(f"--model {folder}: {message}", refusal(str(folder), *arguments))


def test_ranks_that_do_not_divide_the_heads(shapes: str) -> None:
    refused = refusal(shapes, "--tensor-parallel-size", "3")
    expected = (
        "generate.tensor_parallel_size: 3 ranks cannot divide the 6 attention heads and 2 key/value heads of shapes:"
        " take one of 1, 2, 6"
    )
    assert refused == expected


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        yield server


def address(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def hub(url: str, cache: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}


def test_a_hub_that_refuses_connections(listener: socket.socket, tmp_path: Path) -> None:
    url = address(listener)
    listener.close()
    refused = refusal("owner/name", environment=hub(url, tmp_path))
    assert re.fullmatch(f"--model owner/name: {url} cannot be reached: .*refused; {_REMEDY}", refused)


@pytest.mark.parametrize("status", [503, 404])
def test_a_hub_with_another_answer(status: int, tmp_path: Path) -> None:
    class Refuse(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(status)

    with HTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = address(server.socket)
        refused = refusal("owner/name", environment=hub(url, tmp_path))
        server.shutdown()
    assert refused == f"--model owner/name: {url} answers with status {status}; {_REMEDY}"


def test_a_hub_without_an_address(tmp_path: Path) -> None:
    refused = refusal("owner/name", environment=hub("http://no-such-host.invalid", tmp_path))
    assert re.fullmatch(f"--model owner/name: http://no-such-host.invalid cannot be reached: .*; {_REMEDY}", refused)


_REMEDY = "name a folder, or download the model where there is a connection"


@pytest.mark.parametrize(("num_waiting", "limit", "seconds"), [(0, {}, 2), (2, {"HF_HUB_ETAG_TIMEOUT": "1"}, 1)])
def test_a_silent_hub(
    num_waiting: int, limit: dict[str, str], seconds: int, listener: socket.socket, tmp_path: Path
) -> None:
    """Without an answer, and with dropped packets: the system drops those to a full queue of connections."""
    waiting = [socket.socket() for _ in range(num_waiting)]
    for client in waiting:
        client.setblocking(False)
        client.connect_ex(listener.getsockname())
    url = address(listener)
    started = time.monotonic()
    refused = refusal("owner/name", environment=hub(url, tmp_path) | limit)
    assert time.monotonic() - started < 10
    assert refused == f"--model owner/name: {url} does not answer within {seconds} s (HF_HUB_ETAG_TIMEOUT); {_REMEDY}"
    for client in waiting:
        client.close()


def test_the_cache_stands_in_for_a_hub(listener: socket.socket, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "bert"}')
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0123")
    listener.close()
    refused = refusal("owner/name", environment=hub("http://127.0.0.1:9", tmp_path))
    assert "model_type 'bert' is not supported" in refused


def test_an_offline_hub(tmp_path: Path) -> None:
    refused = refusal("owner/name", environment={"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    assert refused == f"--model owner/name: HF_HUB_OFFLINE is set, and the cache has no such model; {_REMEDY}"
