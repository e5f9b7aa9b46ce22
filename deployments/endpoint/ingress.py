"""The HTTP endpoint: its routes, and the state that they share."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from ray import serve
from ray.serve.handle import DeploymentHandle

import raylens
from raylens.deployments.api.models import Health, ModelCard, ModelList, Version
from raylens.deployments.config import AppConfig
from raylens.deployments.endpoint.admission import Admission
from raylens.deployments.endpoint.api_keys import ApiKeys
from raylens.deployments.endpoint.background import BackgroundJobs
from raylens.deployments.endpoint.batch_routes import BatchRoutes
from raylens.deployments.endpoint.batch_runner import BatchRunner
from raylens.deployments.endpoint.errors import ERROR_RESPONSES, add_error_handlers
from raylens.deployments.endpoint.file_routes import FileRoutes
from raylens.deployments.endpoint.gate import Gate
from raylens.deployments.endpoint.generation import Generations
from raylens.deployments.endpoint.generation_routes import GenerationRoutes
from raylens.deployments.endpoint.health import StageMonitor
from raylens.deployments.endpoint.json_route import JsonRoute
from raylens.deployments.endpoint.metrics_export import export_metrics
from raylens.deployments.endpoint.operator_routes import OperatorRoutes
from raylens.deployments.endpoint.page_route import CHAT_PAGE, PageFiles, examples, page
from raylens.deployments.endpoint.pooling_routes import PoolingRoutes
from raylens.deployments.endpoint.served_models import ModelRoute, ServedModels
from raylens.deployments.endpoint.sign_in_routes import add_sign_in_routes
from raylens.deployments.endpoint.stored_responses import ResponseStore
from raylens.deployments.endpoint.token_routes import TokenRoutes
from raylens.deployments.item_store.client import Shards
from raylens.deployments.item_store.shared_items import SharedBatches, SharedItems, SharedResponses, SharedUploads
from raylens.deployments.metrics.definitions import IngressMetrics
from raylens.deployments.metrics.error_codes import known_errors
from raylens.deployments.pipeline.pipeline import Pipeline
from raylens.deployments.pipeline.turns import Turns
from raylens.deployments.ray_internals.handles import num_running_replicas, route_on_this_loop
from raylens.deployments.ray_internals.lost_nodes import num_lost_nodes
from raylens.deployments.replica_start import Replica, start_replica
from raylens.deployments.routing.work_scaling import PendingWork
from raylens.deployments.stages.process_setup import end_startup
from raylens.deployments.stages.stage_calls import StageHandles

REQUESTS = "requests"
_REPORT_SECONDS = 0.5
_NODES_SECONDS = 2.0
_KNOWN_SECONDS = 300.0
"""A new replica waits this long for its stages. Then it answers without them, and names the missing stage."""


class Ingress(Replica):
    """One replica of the endpoint. Wrapped by `serve.ingress` in `deployments/app.py`."""

    def __init__(self, config: AppConfig, stages: Mapping[str, StageHandles], *shards: DeploymentHandle[Any]) -> None:
        """`stages`: each model's, by the suffix of their names, see `AppConfig.by_suffix`. `shards`: of SharedState."""
        self._spans = start_replica("ingress", config)
        route_on_this_loop(*shards, *chain.from_iterable(own.all() for own in stages.values()))
        self._config = config
        self._keys = ApiKeys(config.auth.keys_file)
        self._open_requests = PendingWork(REQUESTS)
        self._metrics = IngressMetrics([one.model_name for one in config.models], known_errors(), self._keys.names)
        self._shards = Shards(shards)
        self._uploads = SharedUploads(self._shards)
        self._stored = ResponseStore(
            SharedResponses(self._shards), config.admission.max_body_bytes, keeps=config.responses.max_bytes > 0
        )
        self._turns = Turns()
        self._ingresses: DeploymentHandle[Any] | None = None
        if config.ingress.max_replicas > 1:
            own = serve.get_replica_context()
            self._ingresses = serve.get_deployment_handle(own.deployment, own.app_name)
            route_on_this_loop(self._ingresses)
        self._models = ServedModels(
            [self._model_route(suffix, own, stages[suffix], shards) for suffix, own in config.by_suffix().items()]
        )

    def _model_route(
        self, suffix: str, config: AppConfig, stages: StageHandles, shards: Sequence[DeploymentHandle[Any]]
    ) -> ModelRoute:
        """`config`: the model's settings, see `AppConfig.by_suffix`."""
        monitor = StageMonitor(
            {"shared": shards, "preprocess": [stages.preprocess], "generate": [stages.generate]}
            | ({"encode": [stages.encoders["encode"]]} if "encode" in stages.encoders else {}),
            away_timeout_s=config.ingress.away_timeout_s,
            may_rest=["encode"] if config.encode.min_replicas == 0 else [],
            dispensable=["encode"] if config.encode.placement == "auto" else [],
        )
        pipeline = Pipeline(
            config.media,
            stages.preprocess,
            stages.generate,
            SharedItems(self._shards, self._metrics.items_recomputed),
            self._metrics,
            self._uploads,
            self._turns,
            on_reply=monitor.saw,
            model=suffix,
            chooses_by_prefix=config.generate.max_replicas > 1,
        )
        adds_all_images = config.vision_plugin.add_all_images_to_prompt
        return ModelRoute(config.model_name, suffix, monitor, pipeline, config.media.limits, adds_all_images)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Returns the routes, bound to this object. Ray Serve calls this after the constructor."""
        api = FastAPI(
            title="Raylens",
            description="Vision-language models behind an OpenAI-compatible API.",
            lifespan=self._lifespan,
            docs_url=None,  # its page loads scripts from other sites
            redoc_url=None,
        )
        api.router.route_class = JsonRoute
        config = self._config
        timeout_s = config.ingress.first_token_timeout_s
        self._admission = Admission(config.admission, self._metrics.count_rejection)
        self._jobs = BackgroundJobs(self._stored.shared, self._admission, self._open_requests)
        generations = Generations(self._models, self._metrics, config.metrics, timeout_s)
        GenerationRoutes(generations, self._stored, self._jobs).add_to(api)
        PoolingRoutes(generations).add_to(api)
        TokenRoutes(self._models, self._stored).add_to(api)
        FileRoutes(self._uploads).add_to(api)
        self._stored.add_to(api)
        batches = SharedBatches(self._shards)
        BatchRoutes(batches).add_to(api)
        self._batch_runner = BatchRunner(batches, self._uploads, self._keys, api)
        OperatorRoutes(partial(export_metrics, config.metrics.port)).add_to(api)
        route = api.add_api_route
        route("/v1/models", self.models, methods=["GET"], responses=ERROR_RESPONSES)
        route("/v1/models/{model:path}", self.model, methods=["GET"], responses=ERROR_RESPONSES)
        unhealthy: dict[int | str, dict[str, Any]] = {503: {"model": Health}}
        for path in ("/health", "/ping"):
            route(path, self.health, methods=["GET"], response_model=Health, responses=unhealthy)
            route(path, self.health, methods=["HEAD"], include_in_schema=False)
        route("/version", self.version, methods=["GET"], responses=ERROR_RESPONSES)
        page(CHAT_PAGE).add_to(api, "/")
        PageFiles().add_to(api)
        add_sign_in_routes(api)
        examples().add_to(api, "/examples")
        add_error_handlers(api)
        origins = config.ingress.cors_origins
        api.add_middleware(
            Gate,
            keys=self._keys,
            admission=self._admission,
            config=config.admission,
            origins=origins,
            hosts={host.lower() for host in config.ingress.allowed_hosts},
            count_error=self._metrics.count_error,
            open_requests=self._open_requests,
            spans=self._spans,
            turns=self._turns,
        )
        if origins:
            api.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        return api

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the metric for `deployments/routing/work_scaling.py`."""
        return self._open_requests.stats()

    @asynccontextmanager
    async def _lifespan(self, api: FastAPI) -> AsyncIterator[None]:
        node_watch = asyncio.create_task(self._watch_nodes())
        self._shards.open()
        routes = self._models.routes.values()
        for route in routes:
            await route.pipeline.open()
        # Ray Serve may send requests to the replica from here on.
        with suppress(TimeoutError):
            async with asyncio.timeout(_KNOWN_SECONDS):
                await asyncio.gather(*(route.monitor.known() for route in routes))
        end_startup()
        reporter = asyncio.create_task(self._report_forever())
        self._batch_runner.open()
        yield
        reporter.cancel()
        node_watch.cancel()
        await self._batch_runner.close()
        self._jobs.close()
        for route in routes:
            route.monitor.close()
            await route.pipeline.close()
        await self._shards.close()

    async def _report_forever(self) -> None:
        while True:
            if self._ingresses is not None:
                self._admission.divide(max(1, num_running_replicas(self._ingresses)))
            self._metrics.state.report_load(self._open_requests.amount, self._admission.num_waiting)
            self._metrics.state.report_budget(self._admission.all.used, self._admission.all.limit)
            for model, route in self._models.routes.items():
                ages = route.monitor.ages()
                for stage, state in route.monitor.states().items():
                    self._metrics.state.report_stage(model, stage, is_ready=state == "ready", age_s=ages[stage])
            await asyncio.sleep(_REPORT_SECONDS)

    async def _watch_nodes(self) -> None:
        while True:
            with suppress(Exception):  # the head may be away, and comes back
                self._metrics.state.lost_nodes.set(await asyncio.to_thread(num_lost_nodes))
            await asyncio.sleep(_NODES_SECONDS)

    async def models(self) -> ModelList:
        """Lists the served models, the default model first. Each model's adapters follow it."""
        return ModelList(data=self._models.cards)

    async def model(self, model: str) -> ModelCard:
        """Describes a served model or an adapter by its name; 404 for any other name."""
        return self._models.card(model)

    async def health(self, request: Request) -> JSONResponse:
        """Answers 200 if all stages of all models are ready, else 503; the body says which is not. Needs no API key."""
        health = self._models.health()
        # Programs poll this during the start, so the access log does not count it as a failure.
        request.state.is_starting = not health.ready and "unresponsive" not in health.stages.values()
        return JSONResponse(health.model_dump(), 200 if health.ready else 503)

    async def version(self) -> Version:
        """Returns the version of this server's software."""
        return Version(version=raylens.__version__)
