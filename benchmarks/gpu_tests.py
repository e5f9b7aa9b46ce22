"""Runs the tests that need a GPU: counts passes and lists failures.

    python -m benchmarks.gpu_tests [--output FILE]

Only files with a test marked `gpu` are collected, so other tests' libraries may be missing. Each file has its own
process: after a GPU error, every later test of the same process fails. The file with all families runs last, in several
parallel processes, because most of its time is compilation on the host. The document is written after each test, so a
hanging or crashing test does not lose the others' results. The last line is one JSON document.
"""

import importlib.util
import os
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.document import publish, save
from benchmarks.gpu_limits import chosen_device, device_parser, machine_of
from benchmarks.parts import TREE, Outcome, Part, run_part

SECONDS_OF_A_TEST, SECONDS_OF_A_FILE = 90, 300
_MARK = re.compile(r"^(@|pytestmark = )pytest\.mark\.gpu", re.MULTILINE)
ALL_FAMILIES, MOST_SHARDS = "test_language_families.py", 8


def document_of(counts: Counter[str], failed: dict[str, str], machine: dict[str, Any]) -> dict[str, Any]:
    failures = [{"test": test, "reason": reason} for test, reason in failed.items()]
    return {"measured": {"tests": {**counts, "failures": failures}}, "machine": machine}


class Results:
    """A pytest plug-in that counts results, and keeps the names of failed tests with the last line of the reason.
    `shard`: (index, number) of the part of a file's tests to run."""

    def __init__(self, machine: dict[str, Any], output: Path | None, shard: tuple[int, int] = (0, 1)) -> None:
        self._shard = shard
        self._num_left = 0
        self._counts: Counter[str] = Counter()
        self._failed: dict[str, str] = {}
        self._running = ""
        self._machine = machine
        self._output = output

    @property
    def document(self) -> dict[str, Any]:
        counts = self._counts + Counter({"not run": self._num_left})
        return document_of(counts, self._failed, self._machine) | {"running": self._running}

    @pytest.hookimpl(trylast=True)  # after `-m gpu` has chosen
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps tests of one family together, because they share fixtures."""
        index, number = self._shard
        items[:] = items[len(items) * index // number : len(items) * (index + 1) // number]
        self._num_left = len(items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running = nodeid
        self._num_left -= 1
        save(self.document, self._output)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report)

    def pytest_sessionfinish(self) -> None:
        self._running = ""

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self._counts[report.outcome] += 1
        if report.failed:
            self._failed[report.nodeid] = report.longreprtext.strip().rpartition("\n")[2]


def files_with_gpu_tests(folder: Path) -> list[str]:
    files = sorted(folder.rglob("test_*.py"), key=lambda path: (path.name == ALL_FAMILIES, path))
    return [str(path) for path in files if _MARK.search(path.read_text())]


def arguments(file: str) -> list[str]:
    """Returns pytest's arguments. They avoid the project's own options, which name plug-ins that may not be
    installed."""
    limits = ["--timeout", str(SECONDS_OF_A_TEST)] if importlib.util.find_spec("pytest_timeout") else []
    options = ["-m", "gpu", "--continue-on-collection-errors", "--import-mode=importlib", "-p", "no:cacheprovider"]
    return ["-o", "addopts=", *options, *limits, "--tb=short", "-q", file]


class AllResults:
    def __init__(self, device: str, machine: dict[str, Any], output: Path | None) -> None:
        self._device = device
        self._machine = machine
        self._output = output
        self._counts: Counter[str] = Counter()
        self._failed: dict[str, str] = {}

    @property
    def document(self) -> dict[str, Any]:
        return document_of(self._counts, self._failed, self._machine)

    def run(self, file: str, num_shards: int = 1) -> None:
        """Runs a file's tests in one parallel process per shard."""
        arguments = ("-m", "benchmarks.gpu_tests", "--device", self._device, "--file", file)
        parts = [
            Part(file, (*arguments, "--shard", str(index), str(num_shards)), SECONDS_OF_A_FILE)
            for index in range(num_shards)
        ]
        with ThreadPoolExecutor(num_shards) as pool:
            for outcome in pool.map(run_part, parts):
                self._add(file, outcome)

    def _add(self, file: str, outcome: Outcome) -> None:
        own = dict(outcome.document.get("measured", {}).get("tests", {}))
        failures = {one["test"]: one["reason"] for one in own.pop("failures", [])}
        running = outcome.document.get("running", "")
        self._counts.update(own)
        if outcome.state != "ok" and (running or not failures):
            self._counts[outcome.state if outcome.state == "timed out" else "crashed"] += 1
            failures[running or file] = " | ".join([outcome.reason, *outcome.last_lines[-3:]])
        self._failed |= failures
        print(f"{Path(file).name}: {outcome.state}, {own}", flush=True)
        save(self.document, self._output)


def main() -> int:
    parser = device_parser(__doc__)
    parser.add_argument("--file", help="only this file, in this process")
    parser.add_argument("--shard", nargs=2, type=int, default=(0, 1), help="and of its tests only these: INDEX NUMBER")
    options = parser.parse_args()
    machine = machine_of(chosen_device(parser, options))
    if options.file is not None:
        results = Results(machine, options.output, tuple(options.shard))
        status = pytest.main(arguments(options.file), plugins=[results])
        publish(results.document, options.output)
        return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # for each of several processes
    every = AllResults(options.device, machine, options.output)
    files = files_with_gpu_tests(TREE / "tests")
    for file in files[:1] if options.tiny else files:
        num_shards = min(MOST_SHARDS, max(1, (os.cpu_count() or 1) // 2))
        every.run(file, num_shards if Path(file).name == ALL_FAMILIES else 1)
    publish(every.document, options.output)
    return 1 if every.document["measured"]["tests"]["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
