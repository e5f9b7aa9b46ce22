"""docs/metrics.md lists the metrics as they are defined, and no known error is missing from the list of errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylens.deployments.metrics import definitions
from raylens.deployments.metrics.error_codes import known_errors
from raylens.deployments.metrics.instruments import Histogram
from tests.defined_metrics import defined

ROOT = Path(__file__).parents[3]


def test_every_class_of_metrics_is_looked_at() -> None:
    classes = {
        name for name, value in vars(definitions).items() if isinstance(value, type) and name.endswith("Metrics")
    }
    assert classes == {
        "ReplicaMetrics",
        "IngressMetrics",
        "ItemMetrics",
        "CacheMetrics",  # is a part of ItemMetrics
        "PreprocessMetrics",
        "EncodeMetrics",
        "GenerateMetrics",
    }


def test_the_documentation_lists_exactly_the_defined_metrics() -> None:
    lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    documented = [(row[0].strip("`"), row[1], row[2], tuple(re.findall(r"`(\w+)`", row[3]))) for row in rows]
    assert sorted(documented) == sorted((one.name, one.kind, one.unit, one.tags) for one in defined().values())
    assert all(len(row) == 6 and row[4] for row in rows)


def test_buckets_ascend() -> None:
    for instrument in defined().values():
        if isinstance(instrument, Histogram):
            assert list(instrument.buckets) == sorted(set(instrument.buckets))


def codes_in(source: str) -> Iterator[str]:
    """The codes of errors that a source names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            given += node.args[1:2] if isinstance(node.func, ast.Name) and node.func.id == "invalid_media" else []
            yield from (one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str))


@pytest.mark.parametrize("package", ["deployments", "llm", "preprocess", "encoder"])
def test_every_code_of_an_error_is_known(package: str) -> None:
    known = {code for _, code in known_errors()}
    by_haproxy = {"endpoint_timeout", "endpoint_unavailable"}  # which no replica sees
    for file in (ROOT / package).rglob("*.py"):
        if file.name != "haproxy.py":
            assert set(codes_in(file.read_text())) - known - by_haproxy == set(), file
