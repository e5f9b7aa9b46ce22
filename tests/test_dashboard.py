"""The dashboard and docs/metrics.md name the metrics that deployments/metrics.py defines, as Ray exports them."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

from deployments import metrics

ROOT = Path(__file__).parents[1]
DASHBOARDS = ROOT / "dashboards"
SERVE_METRICS = {
    "ray_serve_deployment_replica_healthy",
    "ray_serve_autoscaling_target_replicas",
    "ray_serve_deployment_queued_queries",
    "ray_serve_replica_processing_queries",
}


@dataclass(frozen=True)
class Definition:
    """A metric as deployments/metrics.py defines it, its name without the prefix."""

    name: str
    kind: str
    tags: tuple[str, ...]

    @property
    def series(self) -> set[str]:
        """The names under which Prometheus has it."""
        exported = f"ray_{metrics.PREFIX}{self.name}"
        if self.kind == "counter":
            return {exported if exported.endswith("_total") else f"{exported}_total"}
        if self.kind == "histogram":
            return {f"{exported}_{suffix}" for suffix in ("bucket", "sum", "count")}
        return {exported}


@pytest.fixture
def defined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Definition]:
    """Every metric that the classes of deployments/metrics.py make, by name."""
    found: dict[str, Definition] = {}

    def recorder(kind: str) -> Callable[..., None]:
        def record(name: str, description: str, *, tag_keys: tuple[str, ...] = (), **_: object) -> None:
            assert name.startswith(metrics.PREFIX)
            definition = Definition(name.removeprefix(metrics.PREFIX), kind, tag_keys)
            assert found.setdefault(definition.name, definition) == definition, f"{name} is defined in two ways"

        return record

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, recorder(kind.lower()))
    for cls in vars(metrics).values():
        # Those that take an argument are parts of the others.
        if inspect.isclass(cls) and cls.__module__ == metrics.__name__ and not inspect.signature(cls).parameters:
            cls()
    return found


@pytest.fixture
def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((DASHBOARDS / "raylens.json").read_text())
    panels: list[dict[str, Any]] = dashboard["panels"]
    return panels


def names_used(panels: list[dict[str, Any]]) -> set[str]:
    """The names of Ray's metrics in all expressions."""
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return {name for expression in expressions for name in re.findall(r"\bray_\w+", expression)}


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dashboards.generate", "--check"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_committed_dashboard_is_what_the_generator_makes() -> None:
    result = check(ROOT)
    assert result.returncode == 0, result.stderr


def test_check_fails_when_the_dashboard_was_edited_by_hand(tmp_path: Path) -> None:
    shutil.copytree(DASHBOARDS, tmp_path / "dashboards")
    edited = tmp_path / "dashboards" / "raylens.json"
    edited.write_text(edited.read_text().replace("Overview", "Summary"))
    before = edited.read_text()
    result = check(tmp_path)
    assert result.returncode == 1
    assert "out of date" in result.stderr
    assert edited.read_text() == before


def test_every_metric_on_the_dashboard_is_defined(panels: list[dict[str, Any]], defined: dict[str, Definition]) -> None:
    series = set().union(*(definition.series for definition in defined.values()))
    own = {name for name in names_used(panels) if name.startswith(f"ray_{metrics.PREFIX}")}
    assert own
    assert own - series == set()
    assert names_used(panels) - own == SERVE_METRICS


def test_every_tag_on_the_dashboard_is_one_of_the_metrics(
    panels: list[dict[str, Any]], defined: dict[str, Definition]
) -> None:
    # Serve adds these to every metric that a replica records, Prometheus' histograms have the last.
    always = {"deployment", "replica", "application", "le"}
    for panel in panels:
        for target in panel.get("targets", ()):
            used = {name for names in re.findall(r"by \(([^)]+)\)", target["expr"]) for name in names.split(", ")}
            used |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            tags = {tag for d in defined.values() if d.series & names_used([panel]) for tag in d.tags}
            assert used - always <= tags, panel["title"]


def test_panels_have_their_own_ids_and_places(panels: list[dict[str, Any]]) -> None:
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def test_the_documentation_lists_exactly_the_defined_metrics(defined: dict[str, Definition]) -> None:
    lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    documented = [Definition(row[0].strip("`"), row[1], tuple(re.findall(r"`(\w+)`", row[3]))) for row in rows]
    assert sorted(documented, key=str) == sorted(defined.values(), key=str)
    assert all(len(row) == 6 and row[2] and row[4] for row in rows)


def test_prometheus_reads_the_file_that_ray_writes() -> None:
    config = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["file_sd_configs"] == [{"files": [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]}]
    (source,) = yaml.safe_load((DASHBOARDS / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
