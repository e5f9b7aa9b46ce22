"""What a starting server answers, from its first second until every stage is ready."""

import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO

import httpx
import pytest
from playwright.sync_api import expect

from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.start_page import StartPage, start_page
from tests.chromium import chromium
from tests.waiting import wait_until

FIRST_SECONDS = 20
"""Until the port answers, on a busy machine: Python imports the settings first."""


@pytest.fixture
def starting(shapes: str) -> Iterator[str]:
    """The URL of a server that has just been started."""
    port = free_port()
    command = [sys.executable, "-m", "raylens", "serve", "--model", shapes, "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


def answers(url: str) -> bool:
    try:
        return bool(httpx.get(url).status_code)
    except httpx.TransportError:
        return False


def test_a_browser_waits_for_the_server_by_itself(starting: str) -> None:
    wait_until(lambda: answers(starting), seconds=FIRST_SECONDS)
    health = httpx.get(f"{starting}/health")
    assert health.status_code == 503
    assert health.json() == {
        "ready": False,
        "stages": dict.fromkeys(("shared", "preprocess", "encode", "generate"), "starting"),
        "details": {},
    }
    refused = httpx.post(f"{starting}/v1/chat/completions", json={"messages": "x" * 100_000})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "starting"
    with chromium() as browser:
        page = browser.new_page()
        page.goto(starting)
        expect(page.get_by_role("heading", name="Raylens starts")).to_be_visible()
        expect(page.locator("td.starting").first).to_be_visible()
        expect(page.locator("#health")).to_have_text("Ready", timeout=120_000)
        page.context.close()
    wait_until(lambda: httpx.get(f"{starting}/health").status_code == 200, seconds=60)
    time.sleep(1)
    assert {httpx.get(f"{starting}/health").status_code for _ in range(50)} == {200}, "nobody answers beside HAProxy"


def test_it_tells_what_the_start_says() -> None:
    start = StartPage(["preprocess", "generate", "generate-b"])
    console = StringIO()
    log = start.reading(console)
    start.say("starting Ray <now>")
    assert "Starting ray &lt;now&gt;" in start.page()
    start.say("  3.8 s  generate loading, generate-b ready, ingress loading, preprocess ready, shared-0 ready")
    assert start.health()["stages"] == {"preprocess": "ready", "generate": "starting", "generate-b": "ready"}
    line = "21:18:49 INFO generate: Loading weights: 805M of 2.68GB, 2 s, 00:04 left\n"
    print("an earlier line\n" + line, end="", file=log, flush=True)
    assert line.strip() in start.page()
    assert console.getvalue() == "an earlier line\n" + line


def test_an_end_of_the_start_frees_the_port() -> None:
    port = free_port()
    for _ in range(2):
        with start_page(AppConfig(), "127.0.0.1", port):
            assert httpx.get(f"http://127.0.0.1:{port}/ping").status_code == 503
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/ping")
