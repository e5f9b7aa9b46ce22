"""The parts of a dashboard, without Grafana's format."""

from dataclasses import dataclass

WIDTH = 24
"""Columns of Grafana's grid."""


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series; `{{tag}}` in it stands for the series' tag."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph over time. `unit`: in Grafana's terms. `stacked`: series are drawn as stacked areas. `limit`: the value
    of a threshold line."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str = ""
    stacked: bool = False
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels side by side, `columns` to a line."""

    title: str
    panels: tuple[Panel, ...]
    columns: int = 3

    @property
    def panel_width(self) -> int:
        return WIDTH // self.columns
