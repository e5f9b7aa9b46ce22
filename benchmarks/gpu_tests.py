"""Runs the tests that need a GPU: counts passes and lists failures.

    python -m benchmarks.gpu_tests [--families NAME ...] [--output FILE]

Only files with a test marked `gpu` are collected, so other tests' libraries may be missing. Each file has its own
process: after a GPU error, every later test of the same process fails. The file with all families runs last, in several
parallel processes, because most of its time is compilation on the host. With `--families`, only greedy answers of these
families are compared with `generate`, each family in its own process. The document is written after each test, so a
hanging or crashing test does not lose the others' results. The last line is one JSON document.
"""

import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from benchmarks.document import publish, save
from benchmarks.gpu_limits import chosen_device, device_parser, machine_of
from benchmarks.parts import TREE, Document, Part, run_part

SECONDS_OF_A_TEST, SECONDS_OF_A_FILE = 90, 300
_MARK = re.compile(r"^(@|pytestmark = )pytest\.mark\.gpu", re.MULTILINE)
ALL_FAMILIES, MOST_SHARDS = "test_language_families.py", 8


PARITY = {"cuda": "test_answers_on_a_gpu_equal_generate", "cpu": "test_answers_equal_generate_alone_and_together"}


class Results:
    """A pytest plug-in that counts results, and keeps the names of passed tests, and those of failed ones with the last
    line of the reason. `shard`: (index, number) of the part of a file's tests to run. `family`: only its tests."""

    def __init__(self, output: Path | None, shard: tuple[int, int] = (0, 1), family: str | None = None) -> None:
        self._output = output
        self._shard = shard
        self._family = family
        self._num_left = 0
        self._counts: Counter[str] = Counter()
        self._passed: list[str] = []
        self._failed: dict[str, str] = {}
        self._running = ""

    @property
    def document(self) -> Document:
        counts = self._counts + Counter({"not run": self._num_left})
        return {"counts": counts, "passed": self._passed, "failed": self._failed, "running": self._running}

    @pytest.hookimpl(trylast=True)  # after `-m gpu` has chosen
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps tests of one family together, because they share fixtures."""
        if self._family is not None:
            items[:] = [item for item in items if self._family in _parameters(item)]
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
        elif report.outcome == "passed":
            self._passed.append(report.nodeid)


def _parameters(item: pytest.Item) -> list[Any]:
    return list(item.callspec.params.values()) if hasattr(item, "callspec") else []


def files_with_gpu_tests(folder: Path) -> list[str]:
    files = sorted(folder.rglob("test_*.py"), key=lambda path: (path.name == ALL_FAMILIES, path))
    return [str(path) for path in files if _MARK.search(path.read_text())]


def arguments(file: str, device: str, family: str | None) -> list[str]:
    """Returns pytest's arguments. They avoid the project's own options, which name plug-ins that may not be
    installed."""
    limits = ["--timeout", str(SECONDS_OF_A_TEST)] if importlib.util.find_spec("pytest_timeout") else []
    chosen = ["-m", "gpu"] if family is None else ["-k", PARITY[device]]
    options = ["--continue-on-collection-errors", "--import-mode=importlib", "-p", "no:cacheprovider"]
    return ["-o", "addopts=", *chosen, *options, *limits, "--tb=short", "-q", file]


class AllResults:
    """The results of all processes. `run` may be called on several threads."""

    def __init__(self, device: str, machine: dict[str, Any], output: Path | None) -> None:
        self._device = device
        self._machine = machine
        self._output = output
        self._lock = Lock()
        self._documents: dict[tuple[str, ...], Document] = {}

    @property
    def document(self) -> Document:
        counts: Counter[str] = Counter()
        passed: list[str] = []
        failures: list[dict[str, str]] = []
        for own in self._documents.values():
            counts.update(own.get("counts", {}))
            passed += own.get("passed", [])
            failures += [{"test": test, "reason": reason} for test, reason in own.get("failed", {}).items()]
        tests = {**counts, "failures": failures}
        return {"measured": {"tests": tests}, "machine": self._machine, "passed": passed}

    def run(self, file: str, *choice: str) -> None:
        """Runs a file's tests, or the chosen ones, in a process."""
        command = ("-m", "benchmarks.gpu_tests", "--device", self._device, "--file", file, *choice)
        key = (file, *choice)
        outcome = run_part(Part(file, command, SECONDS_OF_A_FILE), on_document=lambda own: self._note(key, own))
        own = outcome.document
        running = own.get("running", "")
        if outcome.state != "ok" and (running or not own.get("failed")):
            state = outcome.state if outcome.state == "timed out" else "crashed"
            reason = " | ".join([outcome.reason, *outcome.last_lines[-3:]])
            counts = {**own.get("counts", {}), state: 1}
            own = {**own, "counts": counts, "failed": {**own.get("failed", {}), running or file: reason}}
        self._note(key, own)
        print(f"{Path(file).name} {' '.join(choice)}: {outcome.state}, {own.get('counts')}", flush=True)

    def _note(self, key: tuple[str, ...], own: Document) -> None:
        with self._lock:
            self._documents[key] = own
            save(self.document, self._output)


def run_all(every: AllResults, families: Sequence[str], *, tiny: bool) -> None:
    *files, all_families = files_with_gpu_tests(TREE / "tests")
    num_processes = min(MOST_SHARDS, max(1, (os.cpu_count() or 1) // 2))
    choices: list[tuple[str, ...]] = [("--family", family) for family in families]
    if not families:
        for file in files[:1] if tiny else files:
            every.run(file)
        num_shards = 0 if tiny else num_processes
        choices = [("--shard", str(index), str(num_shards)) for index in range(num_shards)]
    with ThreadPoolExecutor(num_processes) as pool:
        list(pool.map(lambda choice: every.run(all_families, *choice), choices))


def main() -> int:
    parser = device_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=[], help="only greedy parity of these")
    parser.add_argument("--file", help="only this file, in this process")
    parser.add_argument("--shard", nargs=2, type=int, default=(0, 1), help="and of its tests only these: INDEX NUMBER")
    parser.add_argument("--family", help="and only the parity of this family")
    options = parser.parse_args()
    device = chosen_device(parser, options)
    if options.file is not None:
        results = Results(options.output, tuple(options.shard), options.family)
        status = pytest.main(arguments(options.file, device.type, options.family), plugins=[results])
        publish(results.document, options.output)
        return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # for each of several processes
    every = AllResults(options.device, machine_of(device), options.output)
    run_all(every, options.families, tiny=options.tiny)
    publish(every.document, options.output)
    return 1 if every.document["measured"]["tests"]["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
