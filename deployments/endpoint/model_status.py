"""The state of a served model, from its stages' heartbeats."""

import time

from raylens.deployments.api.models import ModelCard
from raylens.deployments.endpoint.health import StageMonitor
from raylens.deployments.stages.stage_calls import StageUnavailableError
from raylens.preprocess.schema import ProcessorIdentity, ToolCallFormat


class ModelStatus:
    """One served model. `name`: its name in the API. `created`: Unix time in seconds."""

    def __init__(self, name: str, monitor: StageMonitor) -> None:
        self.name = name
        self.created = int(time.time())
        self._monitor = monitor

    def ready_processor(self) -> ProcessorIdentity:
        """Returns the identity of Preprocess' processor. Raises StageUnavailableError while the stages start."""
        if self._monitor.served is None:
            raise StageUnavailableError("preprocess", "the stages are still starting")
        return self._monitor.served.processor

    @property
    def tool_calls(self) -> ToolCallFormat | None:
        return None if self._monitor.served is None else self._monitor.served.tool_calls

    @property
    def max_model_len(self) -> int:
        """The context in tokens; 0 while the stages start."""
        return 0 if self._monitor.served is None else self._monitor.served.max_model_len

    @property
    def card(self) -> ModelCard:
        """The API's description of the model. The stages' part is missing while they start."""
        served = self._monitor.served
        return ModelCard(
            id=self.name,
            root=self.name,
            created=self.created,
            max_model_len=None if served is None else served.max_model_len,
            modalities=None if served is None else list(served.modalities),
        )

    @property
    def adapter_cards(self) -> list[ModelCard]:
        """The descriptions of the model's adapters."""
        card = self.card
        adapters = [name for name in self._monitor.adapters if self.adapter_of(name) is not None]
        return [card.model_copy(update={"id": name, "root": name, "parent": self.name}) for name in adapters]

    def adapter_of(self, model: str | None) -> str | None:
        """Returns the adapter of this name, or None."""
        is_served = model in self._monitor.adapters and self._monitor.adapters[model] is None
        return model if is_served and model != self.name else None

    def why_refused(self, adapter: str) -> str | None:
        """Returns why the adapter cannot be served. None: it can, or it does not exist."""
        return self._monitor.adapters.get(adapter)
