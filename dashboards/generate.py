"""Makes `raylens.json`, the Grafana dashboard, out of the rows below.

Knows the metrics by the names under which Ray's agents export them, and Grafana's JSON format; reads no metrics and
imports nothing of the server. `python -m dashboards.generate` writes the file, `--check` only compares it.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).with_name("raylens.json")

_GRID_WIDTH = 24
_PANEL_HEIGHT = 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the name of its series; `{{tag}}` in it is the series' tag."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph over time. `unit` is Grafana's name of it."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels side by side, three to a line, or two when there are two."""

    title: str
    panels: tuple[Panel, ...]


def _sum(series: str, *tags: str) -> str:
    by = f" by ({', '.join(tags)})" if tags else ""
    return f"sum{by} ({series})"


def _rate(series: str, *tags: str) -> str:
    return _sum(f"rate({series}[$__rate_interval])", *tags)


def _quantile(quantile: float, histogram: str, *tags: str) -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{histogram}_bucket', *tags, 'le')})"


def _percentiles(histogram: str, *tags: str) -> tuple[Query, ...]:
    legend = "".join(f"{{{{{tag}}}}} " for tag in tags)
    return tuple(Query(_quantile(q, histogram, *tags), f"{legend}p{q * 100:.0f}") for q in (0.5, 0.95))


def _for_both_caches(expression: str) -> tuple[Query, ...]:
    """`expression` with the name of each cache in place of CACHE."""
    caches = {"mm_cache": "processed items", "encoder_cache": "embeddings"}
    return tuple(Query(expression.replace("CACHE", f"ray_raylens_{name}"), legend) for name, legend in caches.items())


_OVERVIEW = Row(
    "Overview",
    (
        Panel(
            "Requests answered",
            "reqps",
            (Query(_rate("ray_raylens_request_success_total", "finished_reason"), "{{finished_reason}}"),),
        ),
        Panel(
            "Errors",
            "reqps",
            (
                Query(_rate("ray_raylens_request_errors_total", "stage", "code"), "{{stage}}: {{code}}"),
                Query(_rate("ray_raylens_admission_rejections_total", "reason"), "no room: {{reason}}"),
            ),
        ),
        Panel(
            "Tokens",
            "cps",
            (
                Query(_rate("ray_raylens_generation_tokens_total"), "generated"),
                Query(_rate("ray_raylens_prompt_tokens_total"), "prompt"),
                Query(_rate("ray_raylens_prompt_tokens_cached_total"), "prompt, from the prefix cache"),
            ),
            "Counted when a request ends.",
        ),
        Panel("Time to first token", "s", _percentiles("ray_raylens_time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", _percentiles("ray_raylens_inter_token_latency_seconds")),
        Panel("Whole request", "s", _percentiles("ray_raylens_e2e_request_latency_seconds")),
    ),
)

_STAGES = Row(
    "Stage waterfall",
    tuple(
        Panel(
            f"Time in each stage, p{quantile * 100:.0f}",
            "s",
            (Query(_quantile(quantile, "ray_raylens_request_stage_seconds", "stage"), "{{stage}}"),),
            "Of the requests that went through the stage: a cached picture skips the stages before its cache.",
        )
        for quantile in (0.5, 0.95)
    ),
)

_GENERATE = Row(
    "Generate",
    (
        Panel(
            "Sequences",
            "short",
            (
                Query(_sum("ray_raylens_num_requests_running"), "running"),
                Query(_sum("ray_raylens_num_requests_waiting"), "waiting"),
            ),
        ),
        Panel("KV cache in use", "percentunit", (Query("ray_raylens_kv_cache_usage_perc", "{{replica}}"),)),
        Panel(
            "A step of the engine",
            "s",
            (
                Query(
                    f"{_rate('ray_raylens_engine_step_seconds_total', 'replica')}"
                    f" / {_rate('ray_raylens_engine_steps_total', 'replica')}",
                    "{{replica}}",
                ),
            ),
            "The mean. Every sequence that decodes gets a token in each step.",
        ),
        Panel("Preemptions", "ops", (Query(_rate("ray_raylens_num_preemptions_total", "replica"), "{{replica}}"),)),
    ),
)

_ENCODE = Row(
    "Encode",
    (
        Panel("Items encoded together", "short", _percentiles("ray_raylens_encoder_batch_size")),
        Panel(
            "Items encoded",
            "ops",
            (Query(_rate("ray_raylens_encoder_items_total", "modality", "status"), "{{modality}}: {{status}}"),),
        ),
    ),
)

_CACHES = Row(
    "Caches",
    (
        Panel(
            "Hit rate",
            "percentunit",
            # A counter has no series before it first counts: without the zero, a cold cache would show nothing.
            _for_both_caches(f"({_rate('CACHE_hits_total')} or vector(0)) / {_rate('CACHE_queries_total')}"),
        ),
        Panel("Size", "bytes", _for_both_caches(_sum("CACHE_bytes"))),
        Panel("Evictions", "ops", _for_both_caches(_rate("CACHE_evictions_total"))),
    ),
)

_SERVE = Row(
    "Preprocess and Serve",
    (
        Panel(
            "Healthy replicas",
            "short",
            (
                Query(_sum("ray_serve_deployment_replica_healthy", "deployment"), "{{deployment}}"),
                Query(
                    _sum('ray_serve_autoscaling_target_replicas{deployment="Preprocess"}', "deployment"),
                    "{{deployment}}, wanted",
                ),
            ),
        ),
        Panel(
            "Calls waiting for a replica",
            "short",
            (Query(_sum("ray_serve_deployment_queued_queries", "deployment"), "{{deployment}}"),),
        ),
        Panel(
            "Calls in work",
            "short",
            (Query(_sum("ray_serve_replica_processing_queries", "deployment"), "{{deployment}}"),),
        ),
    ),
)

ROWS = (_OVERVIEW, _STAGES, _GENERATE, _ENCODE, _CACHES, _SERVE)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana 11 reads it."""
    panels = [panel | {"id": number} for number, panel in enumerate(_placed(ROWS), start=1)]
    return {
        "uid": "raylens",
        "title": "Raylens",
        "schemaVersion": 39,
        "version": 1,
        "tags": ["raylens"],
        "timezone": "browser",
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "graphTooltip": 1,
        "editable": True,
        "templating": {
            "list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }


def _placed(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Headings and panels, each with its place on Grafana's grid of 24 columns."""
    y = 0
    for row in rows:
        yield {
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _GRID_WIDTH, "h": 1},
        }
        y += 1
        columns = 2 if len(row.panels) == 2 else 3
        width = _GRID_WIDTH // columns
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, columns)
            place = {"x": column * width, "y": y + line * _PANEL_HEIGHT, "w": width, "h": _PANEL_HEIGHT}
            yield _graph(panel) | {"gridPos": place}
        y += -(-len(row.panels) // columns) * _PANEL_HEIGHT


def _graph(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the dashboard, or with `--check` returns 1 when the file is not what would be written."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.generate", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    args = parser.parse_args(argv)
    text = json.dumps(dashboard(), indent=2) + "\n"
    if not args.check:
        DASHBOARD.write_text(text, encoding="utf-8")
        return 0
    if not DASHBOARD.exists() or DASHBOARD.read_text(encoding="utf-8") != text:
        print(f"{DASHBOARD.name} is out of date: run `python -m dashboards.generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
