"""The dashboard is what the generator makes, Grafana can read it, it has every metric, and no tag that there is not."""

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

from raylens.deployments.config import MetricsConfig
from raylens.deployments.metrics.instruments import PREFIX, Instrument
from raylens.deployments.metrics.waterfall_stages import WATERFALL
from tests.dashboards.grafana_schema import schema_violations
from tests.defined_metrics import defined, exported_names, labels

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards"
VARIABLES = {"datasource", "application", "deployment", "replica", "node"}
METRICS = {name: metric for metric in defined().values() for name in exported_names(metric)}
DASHBOARD: dict[str, Any] = json.loads((DASHBOARDS / "raylens.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
RULES = [
    rule
    for name in ("recording.yml", "alerts.yml")
    for group in yaml.safe_load((DASHBOARDS / "rules" / name).read_text())["groups"]
    for rule in group["rules"]
]


def metrics_of(expression: str) -> list[Instrument[Any]]:
    """The metrics that the expression asks, not those that it has from recording rules."""
    names = re.findall(rf"(?<![\w:]){PREFIX}\w+", expression)
    assert set(names) <= METRICS.keys(), expression
    return [METRICS[name] for name in names]


def tags_of(expression: str) -> set[str]:
    """The tags that the expression selects or groups by."""
    grouped = {tag for tags in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for tag in tags.split(", ") if tag}
    return grouped | set(re.findall(r"(\w+)(?:=|=~|!=|!~)\"", expression))


PLACES = {
    "PANEL": "$.panels[1]",
    "TARGET": "$.panels[1].targets[0]",
    "FIELD": "$.panels[1].fieldConfig.defaults",
    "VARIABLE": "$.templating.list[1]",
}


def panel(board: Any) -> Any:
    return board["panels"][1]


def target(board: Any) -> Any:
    return panel(board)["targets"][0]


def options(board: Any) -> Any:
    return panel(board)["options"]


def field(board: Any) -> Any:
    return panel(board)["fieldConfig"]["defaults"]


def variable(board: Any) -> Any:
    return board["templating"]["list"][1]


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dashboards.generate", "--check"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_committed_files_are_what_the_generator_makes() -> None:
    result = check(ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["raylens.json", "rules/recording.yml", "rules/alerts.yml"])
def test_check_fails_when_a_file_was_edited_by_hand(name: str, tmp_path: Path) -> None:
    shutil.copytree(DASHBOARDS, tmp_path / "dashboards")
    edited = tmp_path / "dashboards" / name
    edited.write_text(edited.read_text().replace("application", "app"))
    before = edited.read_text()
    result = check(tmp_path)
    assert result.returncode == 1
    assert f"{edited.name} is out of date" in result.stderr
    assert edited.read_text() == before


def test_it_is_as_grafanas_schema_has_it() -> None:
    assert schema_violations(DASHBOARD) == []


@pytest.mark.parametrize(
    ("spoil", "violation"),
    [
        (
            lambda board: board.update(titel="Raylens"),
            "$: Additional properties are not allowed ('titel' was unexpected)",
        ),
        (lambda board: board.update(refresh=10), "$.refresh: 10 is not of type 'string'"),
        (lambda board: board.update(graphTooltip=3), "$.graphTooltip: 3 is not one of [0, 1, 2]"),
        (lambda board: board.pop("annotations"), "$: 'annotations' is a required property"),
        (lambda board: board.update(panels=None), "$.panels: None is not of type 'array'"),
        (lambda board: panel(board).update(title=5), "PANEL.title: 5 is not of type 'string'"),
        (lambda board: panel(board).update(id=True), "PANEL.id: True is not of type 'integer'"),
        (lambda board: panel(board)["gridPos"].pop("w"), "PANEL.gridPos: 'w' is a required property"),
        (lambda board: panel(board).update(links=["docs"]), "PANEL.links[0]: 'docs' is not of type 'object'"),
        (lambda board: panel(board).pop("type"), "PANEL: 'type' is a required property"),
        (lambda board: target(board).update(expression="up"), "TARGET: Additional properties are not allowed"),
        (lambda board: target(board).pop("refId"), "TARGET: 'refId' is a required property"),
        (lambda board: target(board).update(format="graph"), "TARGET.format: 'graph' is not one of"),
        (lambda board: target(board)["datasource"].update(type="prometeus"), "TARGET.datasource.type: 'prometeus' is"),
        (lambda board: options(board)["legend"].pop("calcs"), "PANEL.options.legend: 'calcs' is a required property"),
        (lambda board: options(board)["tooltip"].update(mode="some"), "PANEL.options.tooltip.mode: 'some' is not one"),
        (lambda board: options(board).update(colour="red"), "PANEL.options: Additional properties are not allowed"),
        (lambda board: field(board).update(unit=["s"]), "FIELD.unit: ['s'] is not of type 'string'"),
        (lambda board: field(board).update(thresholds={"mode": "absolute"}), "FIELD.thresholds: 'steps' is a required"),
        (lambda board: field(board)["custom"].update(fillOpacity="much"), "FIELD.custom.fillOpacity: 'much' is not of"),
        (
            lambda board: field(board)["custom"].update(fillOpacty=5),
            "FIELD.custom: Additional properties are not allow",
        ),
        (lambda board: variable(board).update(type="choice"), "VARIABLE.type: 'choice' is not one of"),
        (lambda board: variable(board)["current"].pop("value"), "VARIABLE.current: 'value' is a required property"),
        (lambda board: variable(board).update(multi="yes"), "VARIABLE.multi: 'yes' is not of type 'boolean'"),
    ],
)
def test_the_schema_knows_fields_types_and_choices(spoil: Callable[[Any], object], violation: str) -> None:
    board = copy.deepcopy(DASHBOARD)
    spoil(board)
    (found,) = schema_violations(board)
    for name, place in PLACES.items():
        violation = violation.replace(name, place)
    assert found.startswith(violation)


def test_a_panel_of_an_unknown_type_is_a_violation() -> None:
    board = copy.deepcopy(DASHBOARD)
    panel(board).update(type="timeserie")
    (found,) = schema_violations(board)
    assert found.startswith("$.panels[1].type: 'timeserie' is not one of")
    assert "'timeseries'" in found


def test_every_metric_is_on_a_panel() -> None:
    shown = {metric.name for expression in EXPRESSIONS for metric in metrics_of(expression)}
    assert {metric.name for metric in METRICS.values()} - shown == set()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_tags_that_its_metrics_have(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        if metrics := metrics_of(target["expr"]):
            known = set().union(*(labels(metric) for metric in metrics))
            assert tags_of(target["expr"]) <= known, target["expr"]
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= tags_of(target["expr"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record") or rule["alert"])
def test_a_rule_asks_for_tags_that_its_metrics_have(rule: dict[str, Any]) -> None:
    if metrics := metrics_of(rule["expr"]):
        assert tags_of(rule["expr"]) <= set().union(*(labels(metric) for metric in metrics))


def test_the_replica_is_asked_of_gauges_only() -> None:
    """Counters of all replicas on a node are one series: it would select nothing."""
    for selected in re.findall(rf'({PREFIX}\w+){{[^}}]*replica=~"\$replica"', "\n".join(EXPRESSIONS)):
        assert METRICS[selected].kind == "gauge", selected


def test_every_series_can_be_chosen_by_the_variables() -> None:
    used = {name for expression in EXPRESSIONS for name in re.findall(r'=~"\$(\w+)"', expression)}
    offered = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert offered == VARIABLES
    assert used == VARIABLES - {"datasource"}
    selections = re.findall(rf"{PREFIX}[\w:]+{{([^}}]*)}}", "\n".join(EXPRESSIONS))
    assert all('application=~"$application"' in selection for selection in selections)


def test_the_waterfall_has_every_stage_in_the_order_of_a_requests_way() -> None:
    (panel,) = [panel for panel in PANELS if panel["title"] == "Where a request's time goes"]
    assert [target["legendFormat"] for target in panel["targets"]] == list(WATERFALL)


def test_panels_have_their_own_ids_and_places() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS), "the runbooks name them by their titles"
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def test_prometheus_finds_both_exporters_of_a_node_in_the_file_that_ray_writes() -> None:
    config = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text())
    own, of_ray = config["scrape_configs"]
    for job in (own, of_ray):
        assert job["file_sd_configs"] == [{"files": [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]}]
    assert own["relabel_configs"][0]["replacement"] == f"$1:{MetricsConfig().port}"
    assert "relabel_configs" not in of_ray


def test_grafana_takes_rates_over_enough_scrapes() -> None:
    (source,) = yaml.safe_load((DASHBOARDS / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    for name in ("prometheus.yml", "prometheus-api.yml"):
        config = yaml.safe_load((DASHBOARDS / name).read_text())
        assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
