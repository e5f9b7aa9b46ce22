"""The parts of a dashboard, without Grafana's format."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

WIDTH = 24
"""Columns of Grafana's grid."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph over time. `unit`: in Grafana's terms. `queries`: PromQL expressions by legend; `{{tag}}` in a legend
    stands for the series' tag. `stacked`: series are drawn as stacked areas. `limit`: the value of a threshold line."""

    unit: str
    title: str
    queries: Mapping[str, str]
    description: str = ""
    stacked: bool = False
    limit: float | None = None


Seconds, Bytes, Count, Share = (partial(Panel, unit) for unit in ("s", "bytes", "short", "percentunit"))
PerSecond, BytesPerSecond = partial(Panel, "ops"), partial(Panel, "Bps")
RequestsPerSecond, TokensPerSecond = partial(Panel, "reqps"), partial(Panel, "cps")


class Row:
    """Panels side by side, `columns` to a line."""

    def __init__(self, title: str, *panels: Panel, columns: int = 3) -> None:
        self.title = title
        self.panels = panels
        self.panel_width = WIDTH // columns
