"""The command line as people type it, in processes of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent.parent
RAYLENS = [sys.executable, "-m", "deployments"]


def run(*arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RAYLENS, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_help_teaches() -> None:
    assert "serve" in run("--help").stdout
    text = run("serve", "--help").stdout
    for part in ("--model", "--port", "--config", "coloured shapes", "ray up cluster.yaml"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--model", "/no/such"], "--model /no/such: no such folder"),
        (["serve", "--port", "70000"], "not between 0 and 65535"),
        (["serve", "--port", "x"], "invalid"),
        (["nonsense"], "invalid choice"),
        ([], "required"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_demo_answers_right_and_shows_every_stage() -> None:
    result = run("demo")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"(\d+) of \1 answers are right", result.stdout)
    assert "WRONG" not in result.stdout
    for part in ("media", "processor", "encode", "prefill", "first token", "from the cache", "every stage is ready"):
        assert part in result.stdout


def test_serve_prints_a_curl_line_that_works_and_stops_cleanly() -> None:
    with subprocess.Popen(
        [*RAYLENS, "serve", "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as shells start what runs in the background
    ) as server:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        curl = next(line for line in lines if line.startswith("curl "))
        answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
        assert '"finish_reason":"stop"' in answer
        url = re.search(r"http://[^/]+", curl)
        assert url is not None
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url.group()}/health")
