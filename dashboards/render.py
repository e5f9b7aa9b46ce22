"""Draws the dashboard with matplotlib, of what a Prometheus answers to the expressions of its panels.

The pictures show the same series as Grafana, where they stand in Grafana, but are none of Grafana's own making."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter, PercentFormatter

from dashboards.panels import WIDTH
from dashboards.prometheus_api import PrometheusApi, for_all

DASHBOARD = Path(__file__).with_name("raylens.json")

_NUM_POINTS = 240
_INCHES_WIDE = 20.0
_INCHES_OF_ROW = 0.38  # of Grafana's grid
_DOTS_PER_INCH = 80
_MOST_NAMES = 8
_MARGINS = (0.035, 0.1, 0.025, 0.14)  # left, bottom, right and top of a panel of full width and common height
_COLOURS = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#9498a0",
)
_INK, _QUIET, _LIMIT = "#24292f", "#6e7781", "#cf222e"


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Seconds since 1970."""

    start: float
    end: float
    rate_interval: str

    @property
    def step(self) -> float:
        return max(1.0, math.ceil((self.end - self.start) / _NUM_POINTS))


def picture(api: PrometheusApi, rows: Sequence[str], span: TimeRange) -> Figure:
    """Returns the rows of the dashboard with these titles, by default all."""
    panels = _chosen(json.loads(DASHBOARD.read_text())["panels"], rows)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(_INCHES_WIDE, height * _INCHES_OF_ROW), dpi=_DOTS_PER_INCH, facecolor="white")
    for panel in panels:
        place = panel["gridPos"]
        top = 1 - place["y"] / height
        if panel["type"] == "row":
            figure.text(0.008, top - 0.5 / height, panel["title"], size=14, weight="bold", color=_INK, va="center")
            continue
        left, bottom, right, above = _MARGINS
        axes = figure.add_axes(
            (
                place["x"] / WIDTH + left,
                top - (1 - bottom * 2) * place["h"] / height,
                place["w"] / WIDTH - left - right / 2,
                (1 - above - bottom * 3) * place["h"] / height,
            )
        )
        _draw(axes, panel, api, span)
    return figure


def _chosen(panels: list[dict[str, Any]], rows: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the panels of these rows, moved up to where no row is left out. Raises ValueError for an unknown row."""
    titles = [panel["title"] for panel in panels if panel["type"] == "row"]
    if unknown := set(rows) - set(titles):
        raise ValueError(f"there is no row {sorted(unknown)[0]!r}; there are {', '.join(titles)}")
    chosen: list[dict[str, Any]] = []
    top, is_chosen, above = 0, False, 0
    for panel in panels:
        if panel["type"] == "row":
            above = top
            is_chosen = not rows or panel["title"] in rows
            begin = panel["gridPos"]["y"]
        if is_chosen:
            place = panel["gridPos"] | {"y": panel["gridPos"]["y"] - begin + above}
            chosen.append(panel | {"gridPos": place})
            top = max(top, place["y"] + place["h"])
    return chosen


def _draw(axes: Axes, panel: dict[str, Any], api: PrometheusApi, span: TimeRange) -> None:
    lines = _lines(panel, api, span)
    defaults = panel["fieldConfig"]["defaults"]
    times = [second - span.start for second in _grid(span)]
    if "stacking" in defaults["custom"]:
        values = [[0.0 if math.isnan(one) else one for one in line] for line in lines.values()]
        if values:
            axes.stackplot(times, values, labels=list(lines), colors=_COLOURS, alpha=0.85)
    else:
        for index, (name, line) in enumerate(lines.items()):
            axes.plot(times, line, label=name, color=_COLOURS[index % len(_COLOURS)], linewidth=1.4)
    for step in defaults.get("thresholds", {}).get("steps", ())[1:]:
        axes.axhline(step["value"], color=_LIMIT, linewidth=1, linestyle="--")
    if not lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=_QUIET)
    _decorate(axes, panel["title"], defaults["unit"], span, num_lines=len(lines))


def _lines(panel: dict[str, Any], api: PrometheusApi, span: TimeRange) -> dict[str, list[float]]:
    """Returns the values of each series on the grid of times, by its name in the legend. NaN: there is none."""
    lines = {}
    for target in panel["targets"]:
        expression = for_all(target["expr"], span.rate_interval)
        for series in api.over(expression, span.start, span.end, span.step):
            name = target["legendFormat"]
            for label, value in series.labels.items():
                name = name.replace(f"{{{{{label}}}}}", value)
            by_time = {round(second): value for second, value in series.points}
            lines[name] = [by_time.get(round(second), math.nan) for second in _grid(span)]
    return {name: line for name, line in lines.items() if not all(math.isnan(value) for value in line)}


def _grid(span: TimeRange) -> list[float]:
    return [span.start + index * span.step for index in range(int((span.end - span.start) / span.step) + 1)]


def _decorate(axes: Axes, title: str, unit: str, span: TimeRange, *, num_lines: int) -> None:
    axes.set_title(title, loc="left", size=10.5, color=_INK)
    axes.set_xlim(0, span.end - span.start)
    axes.set_ylim(bottom=0, top=None if axes.get_ylim()[1] > 0.05 or num_lines else 1)
    axes.yaxis.set_major_formatter(_formatter(unit))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{int(seconds) // 60}:{int(seconds) % 60:02d}"))
    axes.tick_params(labelsize=8, colors=_QUIET, length=0)
    axes.grid(color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#d0d7de")
    if num_lines:
        handles, names = axes.get_legend_handles_labels()
        if num_lines > _MOST_NAMES:
            names = [*names[: _MOST_NAMES - 1], f"and {num_lines - _MOST_NAMES + 1} more"]
        axes.legend(
            handles[:_MOST_NAMES],
            names[:_MOST_NAMES],
            fontsize=7.5,
            frameon=False,
            labelcolor=_INK,
            loc="upper left",
            ncols=2 if num_lines > 3 else 1,
            handlelength=1.2,
            borderaxespad=0.2,
        )


def _formatter(unit: str) -> Formatter:
    if unit == "percentunit":
        return PercentFormatter(1.0)
    names = {"s": "s", "bytes": "B", "Bps": "B/s", "reqps": "req/s", "ops": "/s", "cps": "/s", "short": ""}
    return EngFormatter(names[unit], sep=" " if names[unit] else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Draws rows of the dashboard into a PNG file."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.render", description=main.__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its URL")
    parser.add_argument("--minutes", type=float, default=30.0, help="how far back")
    parser.add_argument("--rate-interval", default="20s", help="the time over which rates are taken")
    parser.add_argument("--row", action="append", default=[], help="title of a row; may be repeated; default: all")
    parser.add_argument("output", type=Path, help="the PNG file")
    args = parser.parse_args(argv)
    end = time.time()
    span = TimeRange(end - 60 * args.minutes, end, args.rate_interval)
    picture(PrometheusApi(args.prometheus), args.row, span).savefig(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
