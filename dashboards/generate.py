"""Writes the files for Grafana and Prometheus: the dashboard, the recording rules and the alerts.

Refers to metrics by name only and imports nothing of the server."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dashboards.alerts import ALERTS
from dashboards.grafana import dashboard_json
from dashboards.recording import recording_rules
from dashboards.rows import ROWS

_FOLDER = Path(__file__).parent


def files() -> dict[Path, str]:
    """Returns the content of each file."""
    return {
        _FOLDER / "raylens.json": dashboard_json(ROWS),
        _FOLDER / "rules" / "recording.yml": _rule_file("recording", recording_rules()),
        _FOLDER / "rules" / "alerts.yml": _rule_file("alerts", [alert.rule for alert in ALERTS]),
    }


def _rule_file(name: str, rules: Sequence[Mapping[str, Any]]) -> str:
    body = {"groups": [{"name": f"raylens-{name}", "rules": rules}]}
    notice = f"# Made by `python -m dashboards.generate`. Edit dashboards/{name}.py instead.\n"
    return notice + yaml.safe_dump(body, sort_keys=False, width=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the dashboard and the rules, or with `--check` returns 1 if a file is out of date."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.generate", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    args = parser.parse_args(argv)
    stale = [
        (path, text) for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if args.check:
            print(f"{path.name} is out of date: run `python -m dashboards.generate`", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
