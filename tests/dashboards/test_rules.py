"""Prometheus takes the rules, every alert fires when it has to and is silent otherwise, and has its runbook."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from starlette.exceptions import HTTPException

from dashboards.alerts import ALERTS
from dashboards.objectives import DOCS_URL, FAILED_CODES, FIRST_TOKEN_SECONDS
from dashboards.rows import ROWS
from raylens.deployments.endpoint.admission import OverloadedError
from raylens.deployments.endpoint.deadline import DeadlineError
from raylens.deployments.endpoint.errors import error_kind, response_for
from raylens.deployments.metrics.definitions import IngressMetrics
from raylens.deployments.stages.stage_calls import (
    AdapterFailedError,
    ChatTemplateFailedError,
    PlugInFailedError,
    StageFailedError,
    StageUnavailableError,
)
from raylens.preprocess.schema import InvalidRequestError

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards"
ALERT_TESTS = Path(__file__).with_name("alerts.test.yml")
RUNBOOK = (ROOT / "docs" / "alerts.md").read_text()


def promtool(*arguments: str | Path) -> str:
    """Its output; it must not complain."""
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-api.yml"])
def test_prometheus_accepts_the_configuration_and_its_rules(name: str) -> None:
    output = promtool("check", "config", DASHBOARDS / name)
    assert re.findall(r"(\d+) rules found", output) == ["21", "17"]


def test_alerts_fire_where_they_have_to_and_are_silent_otherwise() -> None:
    promtool("test", "rules", ALERT_TESTS)


def test_each_alert_is_tested_both_ways() -> None:
    names = [test["name"].split(",")[0].split() for test in yaml.safe_load(ALERT_TESTS.read_text())["tests"]]
    for word in ("fires", "silent"):
        assert {name for kind, name in names if kind == word} == {alert.name for alert in ALERTS}


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    headings = re.findall(r"^## (Raylens\w+)$", RUNBOOK, re.MULTILINE)
    assert sorted(headings) == sorted({alert.name for alert in ALERTS})
    assert {alert.runbook for alert in ALERTS} == {f"{DOCS_URL}/alerts.md#{heading.lower()}" for heading in headings}
    assert re.match("https?://", DOCS_URL), "Alertmanager makes no link of it"


def test_each_runbook_says_what_it_means_what_to_look_at_and_what_to_do() -> None:
    for section in re.split(r"^## ", RUNBOOK, flags=re.MULTILINE)[1:]:
        for part in ("It means", "Look at", "Do"):
            assert f"**{part}:**" in " ".join(section.split()), section.splitlines()[0]


def test_runbooks_name_panels_that_there_are() -> None:
    named = set(re.findall(r'"([^"]+)"', " ".join(RUNBOOK.split())))
    assert "Errors" in named
    assert named <= {panel.title for row in ROWS for panel in row.panels}


@pytest.mark.parametrize(
    "error",
    [
        StageUnavailableError("encode", "no replica"),
        StageFailedError("generate", "it broke"),
        PlugInFailedError("generate", "it broke"),
        AdapterFailedError("generate", "it broke"),
        ChatTemplateFailedError("preprocess", "it broke"),
        DeadlineError("too late"),
        KeyError("nobody expected it"),
        HTTPException(503),
        InvalidRequestError("too large", field="messages"),
        OverloadedError("no room", reason="queue", retry_after_s=1.0),
        HTTPException(404),
    ],
    ids=repr,
)
def test_what_is_answered_with_a_status_from_500_counts_as_failed(error: Exception) -> None:
    status = error.status_code if isinstance(error, HTTPException) else response_for(error).status_code
    _, code = error_kind(error)
    assert bool(re.fullmatch("|".join(FAILED_CODES), code)) == (status >= 500)


def test_the_objective_for_first_tokens_is_a_bound_of_its_buckets() -> None:
    assert FIRST_TOKEN_SECONDS in IngressMetrics().times.time_to_first_token.buckets
