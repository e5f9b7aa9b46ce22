"""Sends a panel's queries to Prometheus."""

from dataclasses import dataclass
from typing import Any

import httpx

_VARIABLES = ("application", "deployment", "replica", "node")
_SECONDS = 30.0


class QueryError(RuntimeError):
    """Prometheus rejects an expression. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: pairs of time, in seconds since 1970, and value."""

    labels: dict[str, str]
    points: list[tuple[float, float]]

    @property
    def value(self) -> float:
        """Returns the newest value."""
        return self.points[-1][1]


def for_all(expression: str, rate_interval: str) -> str:
    """Returns a panel's expression as Grafana sends it with all variables at `All`."""
    for name in _VARIABLES:
        expression = expression.replace(f"${name}", ".*")
    return expression.replace("$__rate_interval", rate_interval)


class PrometheusApi:
    """`url`: of Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def at(self, expression: str, time: float | None = None) -> list[Series]:
        """`time`: in seconds since 1970, by default now. Raises QueryError."""
        return self._ask("query", query=expression, **({} if time is None else {"time": time}))

    def over(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        """Times are in seconds since 1970, `step` in seconds. Raises QueryError."""
        return self._ask("query_range", query=expression, start=start, end=end, step=step)

    def _ask(self, kind: str, **parameters: str | float) -> list[Series]:
        answer: dict[str, Any] = httpx.get(
            f"{self.url}/api/v1/{kind}", params=parameters, timeout=_SECONDS, trust_env=False
        ).json()
        if answer["status"] != "success":
            raise QueryError(f"{answer['error']} in {parameters['query']}")
        if answer["data"]["resultType"] == "scalar":
            return [Series({}, [_point(answer["data"]["result"])])]
        return [
            Series(one["metric"], [_point(point) for point in one.get("values") or [one["value"]]])
            for one in answer["data"]["result"]
        ]


def _point(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])
