"""Draws the dashboard with matplotlib, from Prometheus' answers to the panels' queries.

The pictures show the same series as Grafana, in the same layout, but are not drawn by Grafana."""

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
from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter, MaxNLocator, PercentFormatter

from dashboards.panels import WIDTH
from dashboards.prometheus_api import PrometheusApi, for_all

DASHBOARD = Path(__file__).with_name("raylens.json")

_NUM_POINTS = 240
_INCHES_OF_COLUMN, _INCHES_OF_ROW = 0.8, 0.36  # of Grafana's grid
_DOTS_PER_INCH = 80
_MOST_NAMES = 14
_COLOURS = (
    *("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7"),
    *("#a463f2", "#97bbf5", "#9c6b4e", "#9498a0", "#1b7f79", "#8c2d04"),
)
_INK, _QUIET, _FAINT, _LIMIT = "#24292f", "#6e7781", "#d8dee4", "#cf222e"


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
    """Returns a picture of the dashboard's rows with these titles, by default of all rows. Raises ValueError for an
    unknown row."""
    panels_of: dict[str, list[dict[str, Any]]] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            panels = panels_of[panel["title"]] = []
        else:
            panels.append(panel)
    if unknown := set(rows) - panels_of.keys():
        raise ValueError(f"there is no row {sorted(unknown)[0]!r}; there are {', '.join(panels_of)}")
    chosen = {title: panels for title, panels in panels_of.items() if not rows or title in rows}
    lines_of = {title: sorted({panel["gridPos"]["y"] for panel in panels}) for title, panels in chosen.items()}
    heights = [1 + chosen[title][0]["gridPos"]["h"] * len(lines) for title, lines in lines_of.items()]
    size = (WIDTH * _INCHES_OF_COLUMN, sum(heights) * _INCHES_OF_ROW)
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    parts = figure.subfigures(len(chosen), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (title, panels) in zip(parts, chosen.items(), strict=True):
        part.suptitle(title, x=0.005, ha="left", size=13, weight="bold", color=_INK)
        grid = part.add_gridspec(len(lines_of[title]), WIDTH)
        for panel in panels:
            x, y, width = (panel["gridPos"][name] for name in ("x", "y", "w"))
            axes = part.add_subplot(grid[lines_of[title].index(y), x : x + width])
            _draw(axes, panel, _lines(panel, api, span), span)
    return figure


def _draw(axes: Axes, panel: dict[str, Any], lines: dict[str, list[float]], span: TimeRange) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    _draw_lines(axes, lines, span, is_stacked="stacking" in defaults["custom"])
    for step in defaults.get("thresholds", {}).get("steps", ())[1:]:
        axes.axhline(step["value"], color=_LIMIT, linewidth=1, linestyle="--")
    _decorate(axes, panel["title"], defaults["unit"], span)
    handles, names = axes.get_legend_handles_labels()
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES - 1] = f"and {len(names) - _MOST_NAMES + 1} more"
    if names:
        columns = max(1, int(panel["gridPos"]["w"] * _INCHES_OF_COLUMN / 2))
        place: dict[str, Any] = {"bbox_to_anchor": (0, -0.08), "ncols": columns}
        style: dict[str, Any] = {"fontsize": 7.5, "frameon": False, "labelcolor": _INK, "handlelength": 1.2}
        axes.legend(handles[:_MOST_NAMES], names[:_MOST_NAMES], loc="upper left", **place, **style, labelspacing=0.25)


def _draw_lines(axes: Axes, lines: dict[str, list[float]], span: TimeRange, *, is_stacked: bool) -> None:
    times = [second - span.start for second in _grid(span)]
    colours = [_COLOURS[index % len(_COLOURS)] for index in range(len(lines))]
    if not lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=_QUIET)
    elif is_stacked:
        values = [[0.0 if math.isnan(one) else one for one in line] for line in lines.values()]
        axes.stackplot(times, values, labels=list(lines), colors=colours, alpha=0.85)
    else:
        for (name, line), colour in zip(lines.items(), colours, strict=True):
            axes.plot(times, line, label=name, color=colour, linewidth=1.4)


def _lines(panel: dict[str, Any], api: PrometheusApi, span: TimeRange) -> dict[str, list[float]]:
    """Returns the values of each series on the time grid, by its name in the legend. NaN: no value."""
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


def _decorate(axes: Axes, title: str, unit: str, span: TimeRange) -> None:
    axes.set_title(title, loc="left", size=10, color=_INK)
    axes.set_xlim(0, span.end - span.start)
    highest = axes.dataLim.y1
    axes.set_ylim(0, highest * 1.08 if math.isfinite(highest) and highest > 0 else 1)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(_formatter(unit))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{int(seconds) // 60}:{int(seconds) % 60:02d}"))
    axes.tick_params(labelsize=8, colors=_QUIET, length=0)
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)


def _formatter(unit: str) -> Formatter:
    if unit == "percentunit":
        return PercentFormatter(1.0)
    if unit == "short":
        return FuncFormatter(lambda value, _: f"{value:g}")
    if unit == "s":
        return EngFormatter("s")
    names = {"bytes": "B", "Bps": "B/s", "reqps": "req/s", "ops": "/s", "cps": "/s"}
    large = EngFormatter(names[unit])
    return FuncFormatter(lambda value, _: f"{value:g} {names[unit]}" if value < 1000 else large(value))


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
