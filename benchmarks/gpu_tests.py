"""The tests that need a GPU: how many pass, and the names of those that fail.

    python -m benchmarks.gpu_tests [--output FILE]

Only files with a test marked `gpu` are collected, so that a library that others need may be missing. Each file has a
process of its own: after an error of the GPU, every later test of the same process fails. The document is written after
each test, so one that hangs or crashes does not take the others' results along. The last line is one JSON document.
"""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.document import publish, save
from benchmarks.gpu_limits import chosen_device, device_parser, machine_of
from benchmarks.parts import TREE, Part, run_part

SECONDS_OF_A_TEST, SECONDS_OF_A_FILE = 90, 240


def document_of(counts: Counter[str], failed: dict[str, str], machine: dict[str, Any]) -> dict[str, Any]:
    failures = [{"test": test, "reason": reason} for test, reason in failed.items()]
    return {"measured": {"tests": {**counts, "failures": failures}}, "machine": machine}


class Results:
    """A plug-in of pytest that counts results, and keeps the names of what failed with the last line of the reason."""

    def __init__(self, machine: dict[str, Any], output: Path | None) -> None:
        self._counts: Counter[str] = Counter()
        self._failed: dict[str, str] = {}
        self._running = ""
        self._machine = machine
        self._output = output

    @property
    def document(self) -> dict[str, Any]:
        return document_of(self._counts, self._failed, self._machine) | {"running": self._running}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running = nodeid
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
    return [str(path) for path in sorted(folder.rglob("test_*.py")) if "mark.gpu" in path.read_text()]


def arguments(file: str) -> list[str]:
    """Returns pytest's. They do without its plug-ins that are not installed, which the project's own settings name."""
    limits = ["--timeout", str(SECONDS_OF_A_TEST)] if importlib.util.find_spec("pytest_timeout") else []
    options = ["-m", "gpu", "--continue-on-collection-errors", "--import-mode=importlib", "-p", "no:cacheprovider"]
    return ["-o", "addopts=", *options, *limits, "--tb=short", "-q", file]


def all_results(files: list[str], device: str, machine: dict[str, Any], output: Path | None) -> dict[str, Any]:
    """Runs each file in a process of its own. Returns the document of all."""
    counts: Counter[str] = Counter()
    failed: dict[str, str] = {}
    for file in files:
        part = Part(file, ("-m", "benchmarks.gpu_tests", "--device", device, "--file", file), SECONDS_OF_A_FILE)
        outcome = run_part(part)
        own = dict(outcome.document.get("measured", {}).get("tests", {}))
        failures = {one["test"]: one["reason"] for one in own.pop("failures", [])}
        counts.update(own)
        running = outcome.document.get("running", "")
        if outcome.state != "ok" and (running or not failures):
            counts["crashed"] += 1
            failures[running or file] = " | ".join([outcome.reason, *outcome.last_lines[-3:]])
        failed |= failures
        print(f"{Path(file).name}: {outcome.state}, {own}", flush=True)
        save(document_of(counts, failed, machine), output)
    return document_of(counts, failed, machine)


def main() -> int:
    parser = device_parser(__doc__)
    parser.add_argument("--file", help="only this file, in this process")
    options = parser.parse_args()
    machine = machine_of(chosen_device(parser, options))
    if options.file is not None:
        results = Results(machine, options.output)
        status = pytest.main(arguments(options.file), plugins=[results])
        publish(results.document, options.output)
        return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)
    files = files_with_gpu_tests(TREE / "tests")
    document = all_results(files[:2] if options.tiny else files, options.device, machine, options.output)
    publish(document, options.output)
    return 1 if document["measured"]["tests"]["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
