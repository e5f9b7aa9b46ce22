"""The parts of a dashboard, without Grafana's format."""

from dataclasses import dataclass

WIDTH = 24
"""Columns of Grafana's grid."""


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the name of its series; `{{tag}}` in it is the series' tag."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph over time. `unit` is Grafana's name of it. `stacked`: series lie on each other as areas. `limit`: a
    value of the unit at which a line is drawn."""

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
