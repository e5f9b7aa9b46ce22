"""The exporter of a node and the files that replicas write, with real processes in the replicas' place."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from raylens.deployments.metrics import exporter
from raylens.deployments.metrics.exporter import NodeCollector
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
REPLICA = """
import sys
from pathlib import Path
from raylens.deployments.config import MetricsConfig
from raylens.deployments.metrics import instruments, recording

folder, deployment, replica = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
own = recording.ReplicaLabels("app", deployment, replica)
recording.metrics_folder = lambda: folder
recording.replica_labels = instruments.replica_labels = lambda: own
recording.record_metrics(MetricsConfig(port=0))
items = instruments.Counter("items", "items", "Items", kind=("a", "b"))
level = instruments.Gauge("1", "level", "A level")
times = instruments.Histogram("s", (0.1, 1.0), "times_seconds", "Times", kind=("a",))
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        items.inc(kind="a")
        times.observe(0.25, kind="a")
    level.set(int(line))
    print("done", flush=True)
"""


class Replica:
    """A process that counts as many items as it is told."""

    def __init__(self, folder: Path, replica: str, deployment: str = "Encode") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", REPLICA, str(folder), deployment, replica],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait()

    def count(self, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        self._wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _wait(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() in ("ready", "done")


@contextmanager
def replicas(folder: Path, *names: str) -> Iterator[list[Replica]]:
    started = [Replica(folder, name) for name in names]
    try:
        yield started
    finally:
        for replica in started:
            replica.kill()


def values(folder: Path) -> dict[tuple[str, str, str], float]:
    """The samples by name, replica, and kind or bound."""
    return {
        (sample.name, sample.labels.get("replica", ""), sample.labels.get("le", sample.labels.get("kind", ""))): float(
            sample.value
        )
        for metric in NodeCollector(folder, "10.0.0.1").collect()
        for sample in metric.samples
    }


def test_counts_of_all_replicas_add_up_and_gauges_stay_apart(tmp_path: Path) -> None:
    with replicas(tmp_path, "one", "two") as (one, two):
        one.count(3)
        two.count(4)
        found = values(tmp_path)
    assert found["raylens_items_total", "", "a"] == 7
    assert found["raylens_items_total", "", "b"] == 0
    assert (found["raylens_level", "one", ""], found["raylens_level", "two", ""]) == (3, 4)
    bounds = {bound: found["raylens_times_seconds_bucket", "", bound] for bound in ("0.1", "1.0", "+Inf")}
    assert bounds == {"0.1": 0, "1.0": 7, "+Inf": 7}
    assert (found["raylens_times_seconds_count", "", "a"], found["raylens_times_seconds_sum", "", "a"]) == (7, 1.75)


def test_what_a_killed_replica_has_counted_stays_and_its_gauges_end(tmp_path: Path) -> None:
    collector = NodeCollector(tmp_path, "10.0.0.1")
    with replicas(tmp_path, "one", "two") as (one, two):
        one.count(3)
        two.count(4)
        one.kill()
        for _ in range(2):  # also when it is asked again
            samples = [sample for metric in collector.collect() for sample in metric.samples]
            counts = {s.labels["kind"]: s.value for s in samples if s.name == "raylens_items_total"}
            assert counts == {"a": 7, "b": 0}
            assert [s.labels["replica"] for s in samples if s.name == "raylens_level"] == ["two"]


def test_many_ended_replicas_leave_no_more_series_than_one(tmp_path: Path) -> None:
    with replicas(tmp_path, "first") as (first,):
        first.count(1)
        before = values(tmp_path)
        for number in range(5):
            with replicas(tmp_path, f"ended-{number}") as (ended,):
                ended.count(2)
        after = values(tmp_path)
    assert after.keys() == before.keys()
    assert after["raylens_items_total", "", "a"] == before["raylens_items_total", "", "a"] + 10


def address(folder: Path) -> str | None:
    file = folder / exporter.ADDRESS_FILE
    return file.read_text() if file.exists() else None


def page(folder: Path) -> str | None:
    try:
        with urllib.request.urlopen(f"http://{address(folder)}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return None


def counted(folder: Path) -> float | None:
    families = text_string_to_metric_families(page(folder) or "")
    samples = [sample for family in families for sample in family.samples if sample.name == "raylens_items_total"]
    return next((sample.value for sample in samples if sample.labels["kind"] == "a"), None)


def test_another_replica_takes_over_the_exporter_and_no_count_is_lost(tmp_path: Path) -> None:
    with replicas(tmp_path, "one") as (one,):
        wait_until(lambda: address(tmp_path) is not None, 10)
        with replicas(tmp_path, "two") as (two,):
            one.count(3)
            two.count(4)
            wait_until(lambda: counted(tmp_path) == 7, 10)
            before = address(tmp_path)
            one.kill()
            wait_until(lambda: address(tmp_path) != before, 10)
            wait_until(lambda: counted(tmp_path) == 7, 10)
    wait_until(lambda: page(tmp_path) is None, 10)  # it ends with the last replica


def test_an_exporter_that_dies_is_started_again(tmp_path: Path) -> None:
    with replicas(tmp_path, "one") as (one,):
        one.count(2)
        wait_until(lambda: counted(tmp_path) == 2, 10)
        before = address(tmp_path)
        children = Path(f"/proc/{one.process.pid}/task").glob("*/children")
        (pid,) = {int(pid) for file in children for pid in file.read_text().split()}
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: address(tmp_path) != before and counted(tmp_path) == 2, 10)


@pytest.mark.slow
def test_silent_connections_are_bounded_and_a_scrape_comes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter._Handler, "timeout", 5)
    port = exporter._serve(NodeCollector(tmp_path, "node"), "127.0.0.1", 0)
    num_threads = threading.active_count()
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(300)]
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).status == 200
        wait_until(lambda: threading.active_count() <= num_threads + 100, 3)
        for connection in silent:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "the last ones in time"
    wait_until(lambda: threading.active_count() == num_threads)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="comes with Debian's prometheus")
def test_promtool_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    with replicas(tmp_path, "one") as (one,):
        one.count(2)
        wait_until(lambda: counted(tmp_path) == 2, 10)
        text = page(tmp_path)
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
