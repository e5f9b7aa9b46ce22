"""The models behind the endpoint: selects the model of a request, and describes all of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raylens.deployments.api.models import Health, ModelCard
from raylens.deployments.api.prompt_fields import MediaFields, PromptAndMedia
from raylens.deployments.endpoint.call import ApiCall
from raylens.deployments.endpoint.health import StageMonitor
from raylens.deployments.endpoint.request_cost import RequestCost, data_url_pixels
from raylens.deployments.pipeline.documents import DOCUMENT, PageBudget
from raylens.deployments.pipeline.last_picture import with_last_picture
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.deployments.pipeline.pipeline import Pipeline
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.stages.stage_calls import StageUnavailableError
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.pooling import Pooling
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.schema import InvalidRequestError, ProcessorIdentity, Prompt
from raylens.preprocess.tool_calls.formats import ToolCallFormat


@dataclass(frozen=True, eq=False, slots=True)
class ModelRoute:
    """One model, `name` in the API. `suffix`: see `AppConfig.by_suffix`. `limits`: for the media of one request.
    `adds_all_images`: a prompt gets all pictures of its request, else the last one. `created`: Unix time in seconds."""

    name: str
    suffix: str
    monitor: StageMonitor
    pipeline: Pipeline
    limits: MediaLimits
    adds_all_images: bool = True
    created: int = field(default_factory=lambda: int(time.time()))

    def ready_processor(self) -> ProcessorIdentity:
        """Returns the identity of Preprocess' processor. Raises StageUnavailableError while the stages start."""
        if self.monitor.served is None:
            raise StageUnavailableError("preprocess", "the stages are still starting")
        return self.monitor.served.processor

    @property
    def tool_calls(self) -> ToolCallFormat | None:
        return None if self.monitor.served is None else self.monitor.served.tool_calls

    @property
    def pooling(self) -> Pooling | None:
        """What the model makes of prompts to be embedded or scored. Raises like `ready_processor`."""
        self.ready_processor()
        return None if self.monitor.served is None else self.monitor.served.pooling

    def check_generates(self) -> None:
        """Raises InvalidRequestError for a model that writes no text."""
        if (pooling := self.pooling) is not None and not pooling.generates:
            reason = f"{self.name!r} writes no text: it answers /v1/embeddings, /v1/rerank, /v1/score or /classify"
            raise InvalidRequestError(reason, field="model")

    @property
    def max_model_len(self) -> int:
        """The context in tokens; 0 while the stages start."""
        return 0 if self.monitor.served is None else self.monitor.served.max_model_len

    @property
    def cards(self) -> list[ModelCard]:
        """The API's descriptions of the model and of its adapters. The stages' part is missing while they start."""
        served = self.monitor.served
        length, modalities = (None, None) if served is None else (served.max_model_len, list(served.modalities))
        name, created = self.name, self.created
        card = ModelCard(id=name, root=name, created=created, max_model_len=length, modalities=modalities)
        adapters = [name for name in self.monitor.adapters if self.adapter_of(name) is not None]
        return [card, *(card.model_copy(update={"id": one, "root": one, "parent": name}) for one in adapters)]

    def adapter_of(self, model: str | None) -> str | None:
        is_served = model in self.monitor.adapters and self.monitor.adapters[model] is None
        return model if is_served and model != self.name else None

    async def opened(self, call: ApiCall, prompts: Sequence[PromptAndMedia]) -> list[PromptAndMedia]:
        """Returns the prompts of a client's request with the pages of documents in their places. Raises
        InvalidRequestError, and StageUnavailableError if Preprocess does not come back."""
        texts = [(prompt, [replace(source, texts=call.texts) for source in media]) for prompt, media in prompts]
        if not any(source.modality == DOCUMENT for _, media in texts for source in media):
            return texts
        budget = PageBudget(self.limits.max_items, lambda number: call.ticket.take(RequestCost(bytes=number)))
        async with self.monitor.while_there(["preprocess"]):
            return [await self.pipeline.opened(*one, call.caller.cache_salt, budget) for one in texts]

    def request(
        self,
        call: ApiCall,
        request_id: str,
        body: MediaFields,
        params: SamplingParams,
        prompt_and_media: tuple[Prompt, list[MediaSource]],
        **fields: Any,
    ) -> PipelineRequest:
        """Returns the pipeline's request. An item outside the body takes its bytes and pixels from the call's budgets
        once it is fetched. `fields`: further fields of the PipelineRequest."""
        prompt, sources = prompt_and_media if self.adds_all_images else with_last_picture(*prompt_and_media)
        return PipelineRequest(
            request_id=request_id,
            context=call.traced.context,
            prompt=prompt,
            media=[replace(source, num_pixels=data_url_pixels(source, self.limits)) for source in sources],
            params=params,
            options=body.mm_processor_kwargs or {},
            video_options=body.video_options,
            cache_salt=call.caller.cache_salt,
            truncation=body.prompt_truncation(params.max_tokens),
            on_fetched=lambda num_bytes, num_pixels: call.ticket.take(RequestCost(bytes=num_bytes, pixels=num_pixels)),
            **fields,
        )


class ServedModels:
    """All models, by their names in the API. The first one is the default."""

    def __init__(self, routes: Sequence[ModelRoute]) -> None:
        self.routes = {route.name: route for route in routes}
        self._first = routes[0]

    def of(self, name: str | None) -> ModelRoute:
        """Returns the model of that name, or else the first model with such an adapter. Raises InvalidRequestError."""
        if name is None:
            return self._first
        with_adapter = (one for one in self.routes.values() if one.adapter_of(name) is not None)
        if (route := self.routes.get(name) or next(with_adapter, None)) is None:
            raise InvalidRequestError(self._why_not(name), field="model", code="model_not_found", status=404)
        return route

    def _why_not(self, name: str) -> str:
        for route in self.routes.values():
            if (reason := route.monitor.adapters.get(name)) is not None:
                return f"adapter {name!r} cannot be served: {reason}"
        return f"{name[:100]!r} is not served here, only {', '.join(map(repr, self.routes))}"

    @property
    def cards(self) -> list[ModelCard]:
        """The descriptions of all models, each followed by its adapters, except those whose names lead elsewhere."""
        return [card for route in self.routes.values() for card in route.cards if self.of(card.id) is route]

    def card(self, name: str) -> ModelCard:
        """Returns the description of a model or an adapter. Raises like `of`."""
        return next(card for card in self.of(name).cards if card.id == name)

    def health(self) -> Health:
        """Returns the states of all stages. A further model's have its suffix, except the shards, which all share."""
        stages, details = dict[str, str](), dict[str, dict[str, str]]()
        for route in self.routes.values():
            names = {stage: stage if stage == "shared" else stage + route.suffix for stage in route.monitor.states()}
            stages |= {names[stage]: state for stage, state in route.monitor.states().items()}
            details |= {names[stage]: told for stage, told in route.monitor.details().items()}
        is_ready = all(route.monitor.is_ready for route in self.routes.values())
        return Health(ready=is_ready, stages=stages, details=details)
