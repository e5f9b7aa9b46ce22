"""The models behind the endpoint: selects the model of a request, and describes all of them."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from raylens.deployments.api.models import Health, ModelCard
from raylens.deployments.endpoint.health import StageMonitor
from raylens.deployments.endpoint.model_status import ModelStatus
from raylens.deployments.endpoint.pipeline_requests import PipelineRequests
from raylens.deployments.pipeline.pipeline import Pipeline
from raylens.preprocess.schema import InvalidRequestError

ToldT = TypeVar("ToldT")

_SHARED = "shared"


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """One model: its status, its stages' monitor and its pipeline. `suffix`: see `AppConfig.by_suffix`."""

    suffix: str
    status: ModelStatus
    monitor: StageMonitor
    pipeline: Pipeline
    requests: PipelineRequests


class ServedModels:
    """All models, by their names in the API. The first one is the default."""

    def __init__(self, routes: Sequence[ModelRoute]) -> None:
        self._routes = {route.status.name: route for route in routes}
        self._first = routes[0]

    def of(self, name: str | None) -> ModelRoute:
        """Returns the model of that name, or the first model with an adapter of that name. Raises InvalidRequestError,
        with status 404, if there is none."""
        if name is None:
            return self._first
        with_adapter = (one for one in self._routes.values() if one.status.adapter_of(name) is not None)
        if (route := self._routes.get(name) or next(with_adapter, None)) is None:
            raise InvalidRequestError(self._why_not(name), field="model", code="model_not_found", status=404)
        return route

    def _why_not(self, name: str) -> str:
        for route in self._routes.values():
            if (reason := route.status.why_refused(name)) is not None:
                return f"adapter {name!r} cannot be served: {reason}"
        served = ", ".join(map(repr, self._routes))
        return f"{name[:100]!r} is not served here, only {served}"

    @property
    def cards(self) -> list[ModelCard]:
        """The descriptions of all models, each followed by its adapters. An adapter with the name of another model, or
        of an earlier adapter, is unreachable and not listed."""
        return [
            card
            for route in self._routes.values()
            for card in (route.status.card, *route.status.adapter_cards)
            if self.of(card.id) is route
        ]

    def card(self, name: str) -> ModelCard:
        """Returns the description of a model or an adapter. Raises like `of`."""
        status = self.of(name).status
        return next(card for card in (status.card, *status.adapter_cards) if card.id == name)

    def health(self) -> Health:
        """Returns the state of every model's stages. The stage names of a further model end with the model's suffix."""
        stages, details, is_ready = dict[str, str](), dict[str, dict[str, str]](), True
        for route in self._routes.values():
            stages |= _named(route.suffix, route.monitor.states())
            details |= _named(route.suffix, route.monitor.details())
            is_ready = is_ready and route.monitor.is_ready
        return Health(ready=is_ready, stages=stages, details=details)

    def stage_states(self) -> Iterator[tuple[str, str, bool, float | None]]:
        """Yields for each stage of each model: the model's name, the stage, whether it is ready, and the seconds since
        its last sign of life (None before the first)."""
        for name, route in self._routes.items():
            ages = route.monitor.ages()
            for stage, state in route.monitor.states().items():
                yield name, stage, state == "ready", ages[stage]

    async def open(self) -> None:
        """Prepares for requests. Call this before the first."""
        for route in self._routes.values():
            await route.pipeline.open()

    async def known(self) -> None:
        """Waits until every stage of every model has answered once."""
        await asyncio.gather(*(route.monitor.known() for route in self._routes.values()))

    async def close(self) -> None:
        for route in self._routes.values():
            route.monitor.close()
            await route.pipeline.close()


def _named(suffix: str, told: Mapping[str, ToldT]) -> dict[str, ToldT]:
    """Returns `told` by the stage names of `/health`. All models share the shards."""
    return {stage if stage == _SHARED else f"{stage}{suffix}": one for stage, one in told.items()}
