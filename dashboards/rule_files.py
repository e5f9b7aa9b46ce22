"""Writes recording rules and alerts in Prometheus' file format."""

from collections.abc import Sequence
from typing import Any

import yaml

from dashboards.alerts import Alert
from dashboards.recording import RecordingRule

_NOTICE = "# Made by `python -m dashboards.generate`. Edit {source} instead.\n"


def recording_file(rules: Sequence[RecordingRule]) -> str:
    return _file("dashboards/recording.py", "raylens-recording", [_recording(rule) for rule in rules])


def alert_file(alerts: Sequence[Alert]) -> str:
    return _file("dashboards/alerts.py", "raylens-alerts", [_alert(alert) for alert in alerts])


def _file(source: str, group: str, rules: list[dict[str, Any]]) -> str:
    body = {"groups": [{"name": group, "rules": rules}]}
    return _NOTICE.format(source=source) + yaml.safe_dump(body, sort_keys=False, width=120)


def _recording(rule: RecordingRule) -> dict[str, Any]:
    labels = {"labels": rule.labels} if rule.labels else {}
    return {"record": rule.name, "expr": rule.expression, **labels}


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook_url": alert.runbook},
    }
