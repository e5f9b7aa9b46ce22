"""`raylens top` as people run it, on servers that answer as the real one does. (On the real one: test_real_top.py.)"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from raylens.deployments.operator import figures
from tests.metric_pages import START, page
from tests.stub_server import Answer, StubServer
from tests.terminal import Terminal, terminal
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent.parent
TOP = [sys.executable, "-m", "raylens", "top"]
CTRL_C = "\x03"


def run(*arguments: str, columns: int = 80, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": str(columns), **environment},
    )


def once(server: StubServer, *arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    return run("--once", "--interval", "0.2", "--url", server.url, *arguments, columns=80, **options)


class Counting:
    """What /metrics says: with each reading, a hundred requests more."""

    def __init__(self, start: dict[str, float] = START) -> None:
        self.num_read = 0
        self._start = start

    def __call__(self, path: str, headers: dict[str, str]) -> Answer:
        assert path == "/metrics"
        self.num_read += 1
        grown = {key: value + 100 * self.num_read * ("request_success" in key) for key, value in self._start.items()}
        return Answer(page(grown).encode())


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer(Counting()) as running:
        yield running


def test_help_teaches() -> None:
    text = run("--help").stdout
    for part in ("--url", "RAYLENS_API_KEY", "--interval", "--once", "Ctrl-C", "/dashboard", "docs/operating.md"):
        assert part in text


@pytest.mark.parametrize("columns", [80, 120])
def test_one_view_fits_its_columns_and_is_whole(server: StubServer, columns: int) -> None:
    shown = run("--once", "--interval", "0.2", "--url", server.url, columns=columns)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert max(len(line) for line in lines) <= columns
    assert "…" not in shown.stdout, "nothing is cut off"
    assert "\x1b" not in shown.stdout, "no colours where there is no terminal"
    text = re.sub(" +", " ", shown.stdout)
    for part in (
        "preprocess not ready, silent for 12 s",
        "Generate 2 1 encode 6 – 0 items",
        "generate 2 4 0 tokens",
        "items – 0 items ██░░░░░░░░ 1.0 MiB of 4.0 MiB 2",
        "30.0 % of the KV caches",
        "Generate g1 10.0.0.1",
        "█████░░░░░ 50.0 % 3 2 300",
        "bytes ░░░░░░░░░░ 1.0 MiB 1.0 GiB",
        "7 files 6.8 KiB",
        "alice 60 0 3.5 k 0",
    ):
        assert part in text, part
    assert re.search(r"requests ended [\d,.]+ 5?00", text), text


def test_not_a_terminal_is_once(server: StubServer) -> None:
    shown = run("--interval", "0.2", "--url", f"{server.url}/v1/")
    assert shown.returncode == 0
    assert shown.stdout.count("requests ended") == 1


def test_an_old_terminal_s_encoding_is_no_failure(server: StubServer) -> None:
    shown = once(server, PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "? preprocess not ready, silent for 12 s ? generate" in shown.stdout


def test_an_admin_s_key_goes_along() -> None:
    def answer(path: str, headers: dict[str, str]) -> Answer:
        if headers.get("authorization") == "Bearer rl-admin":
            return Answer(page(START).encode())
        return Answer(json.dumps({"error": {"message": "the API key is not an admin's"}}).encode(), 403)

    with StubServer(answer) as server:
        assert once(server, RAYLENS_API_KEY="rl-admin").returncode == 0
        other = once(server, "--api-key", "rl-other")
    assert other.returncode == 1
    assert other.stderr == f"raylens: {server.url} refuses: the API key is not an admin's\n"


def test_what_is_no_server_of_ours_is_told() -> None:
    with StubServer(lambda path, headers: Answer(b"<html>{hello}</html>")) as server:
        shown = once(server)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr == f"raylens: {server.url}/metrics is not a page of metrics\n"


def test_a_server_that_is_not_there_is_told(server: StubServer) -> None:
    server.stop()
    shown = once(server)
    server.start()
    assert shown.returncode == 1
    assert shown.stderr == f"raylens: {server.url} does not answer: connection refused\n"


@pytest.mark.parametrize("arguments", [["--url", "localhost:8000"], ["--interval", "0"], ["--interval", "inf"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2


def live(server: StubServer, columns: int = 80, lines: int = 40) -> AbstractContextManager[Terminal]:
    return terminal([*TOP, "--url", server.url, "--interval", "0.3"], columns=columns, lines=lines)


@pytest.mark.slow
def test_it_draws_on_while_the_server_goes_away_and_comes_back(server: StubServer) -> None:
    with live(server) as shown:
        wait_until(lambda: "requests ended" in shown.frame())
        first = shown.frame()
        wait_until(lambda: shown.frame() != first)
        server.stop()
        wait_until(lambda: "no answer since 2 s" in shown.frame())
        assert "connection refused" in shown.frame()
        assert "Generate g1" in shown.frame(), "what was known last stays"
        server.start()
        wait_until(lambda: "no answer" not in shown.frame() and "requests ended" in shown.frame())
        shown.press(CTRL_C)
        assert shown.process.wait(10) == 0
        assert shown.is_left_as_it_was()
        assert shown.after() == "", "it ends without a word"


def test_a_server_that_hangs_is_told_while_it_hangs() -> None:
    hangs, counting = threading.Event(), Counting()

    def answer(path: str, headers: dict[str, str]) -> Answer:
        if hangs.is_set():
            time.sleep(3)
        return counting(path, headers)

    with StubServer(answer) as server, live(server) as shown:
        wait_until(lambda: "requests ended" in shown.frame())
        hangs.set()
        wait_until(lambda: "no answer since 2 s" in shown.frame(), 3)
        hangs.clear()
        wait_until(lambda: "no answer" not in shown.frame())


def test_many_replicas_leave_room_for_all_else() -> None:
    many = {f'Generate:replica_start_time_seconds{{replica="more{n}"}}': 1e6 for n in range(30)}
    with StubServer(Counting(START | many)) as crowded, live(crowded, columns=120, lines=32) as shown:
        wait_until(lambda: "replica  " in shown.frame())
        lines = shown.frame().splitlines()
        assert len(lines) <= 32
        assert re.search(r"^and \d+ more", lines[-1])
        assert any("Generate g1" in line for line in lines), "engines come first"


def test_it_ends_with_its_reason_if_the_server_was_never_there(server: StubServer) -> None:
    server.stop()
    with live(server) as shown:
        assert shown.process.wait(20) == 1
        assert "does not answer: connection refused" in shown.after()
    server.start()


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (figures.rate(0), "0"),
        (figures.rate(1.26), "1.3"),
        (figures.rate(12345.6), "12,346"),
        (figures.short(999), "999"),
        (figures.short(12345.6), "12.3 k"),
        (figures.percent(None), "–"),
        (figures.percent(0.9999), "99.9 %"),
        (figures.percent(0.00001), "0.1 %"),
        (figures.percent(1.0), "100 %"),
        (figures.seconds(0.0042), "4.2 ms"),
        (figures.seconds(0.25), "250 ms"),
        (figures.seconds(75.0), "75 s"),
        (figures.duration(-3.0), "0 s"),
        (figures.duration(7300.0), "2 h"),
        (figures.size(1536), "1.5 KiB"),
        (figures.size(12), "12 B"),
    ],
)
def test_numbers_are_short_and_true(shown: str, text: str) -> None:
    assert shown == text
