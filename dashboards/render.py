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
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter, MaxNLocator, PercentFormatter
from matplotlib.transforms import Bbox

from dashboards.panels import WIDTH
from dashboards.prometheus_api import PrometheusApi, for_all

DASHBOARD = Path(__file__).with_name("raylens.json")

_NUM_POINTS = 240
_INCHES_OF_COLUMN = 0.8  # of Grafana's grid
_INCHES_OF_ROW = 0.36
_DOTS_PER_INCH = 80
_GAP = 0.08  # inches between panels
_LEFT, _RIGHT, _TOP, _AXIS = 0.75, 0.15, 0.38, 0.25  # inches beside the graph, for its title and its numbers
_NAME_INCHES = 0.17  # height of a line of the legend
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
    """Returns a picture of the dashboard's rows with these titles, by default of all rows."""
    panels = _chosen(json.loads(DASHBOARD.read_text())["panels"], rows)
    num_rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    size = (WIDTH * _INCHES_OF_COLUMN, num_rows * _INCHES_OF_ROW)
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, facecolor="#f6f8fa")
    for panel in panels:
        box = _box(panel["gridPos"], size[1])
        if panel["type"] == "row":
            middle = (box.y0 + box.y1) / 2 / size[1]
            figure.text(box.x0 / size[0], middle, panel["title"], size=13, weight="bold", color=_INK, va="center")
        else:
            _draw(figure, box, panel, _lines(panel, api, span), span)
    return figure


def _box(place: dict[str, int], height: float) -> Bbox:
    """Returns a place of the grid in inches from the lower left corner of a figure of `height` inches."""
    left, top = place["x"] * _INCHES_OF_COLUMN, height - place["y"] * _INCHES_OF_ROW
    right, bottom = left + place["w"] * _INCHES_OF_COLUMN, top - place["h"] * _INCHES_OF_ROW
    return Bbox.from_extents(left + _GAP, bottom + _GAP, right - _GAP, top - _GAP)


def _chosen(panels: list[dict[str, Any]], rows: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the panels of these rows, moved up over omitted rows. Raises ValueError for an unknown row."""
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


def _draw(figure: Figure, box: Bbox, panel: dict[str, Any], lines: dict[str, list[float]], span: TimeRange) -> None:
    columns = max(1, int(box.width / 1.9))
    names_height = _NAME_INCHES * math.ceil(min(len(lines), _MOST_NAMES) / columns) + 0.08
    inner = Bbox.from_extents(box.x0 + _LEFT, box.y0 + _AXIS + names_height, box.x1 - _RIGHT, box.y1 - _TOP)
    left, bottom, width, height = _fractions(figure, box)
    card = Rectangle(
        (left, bottom), width, height, transform=figure.transFigure, facecolor="white", edgecolor=_FAINT, zorder=-1
    )
    figure.add_artist(card)
    axes = figure.add_axes(_fractions(figure, inner))
    defaults = panel["fieldConfig"]["defaults"]
    _draw_lines(axes, lines, span, is_stacked="stacking" in defaults["custom"])
    for step in defaults.get("thresholds", {}).get("steps", ())[1:]:
        axes.axhline(step["value"], color=_LIMIT, linewidth=1, linestyle="--")
    _decorate(axes, panel["title"], defaults["unit"], span)
    if lines:
        _name_lines(axes, (left + 0.006, bottom), columns)


def _fractions(figure: Figure, box: Bbox) -> tuple[float, float, float, float]:
    """Returns left, bottom, width and height of a box in inches as shares of the figure."""
    wide, high = figure.get_size_inches()
    return box.x0 / wide, box.y0 / high, box.width / wide, box.height / high


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


def _name_lines(axes: Axes, corner: tuple[float, float], columns: int) -> None:
    """Draws the legend with this lower left corner."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES - 1] = f"and {len(names) - _MOST_NAMES + 1} more"
    axes.legend(
        handles[:_MOST_NAMES],
        names[:_MOST_NAMES],
        loc="lower left",
        bbox_to_anchor=corner,
        bbox_transform=axes.figure.transFigure,
        ncols=columns,
        fontsize=7.5,
        frameon=False,
        labelcolor=_INK,
        handlelength=1.2,
        borderaxespad=0,
        labelspacing=0.25,
    )


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
