"""Builds the Ray Serve application: the deployments, their options and their handles."""

from collections.abc import Iterable
from typing import Any

from ray import serve
from ray.serve import Application

from raylens.deployments.cluster.worker_template import NUM_THREADS
from raylens.deployments.config import AppConfig, GenerateConfig, ProcessConfig, ScaledConfig, StageConfig
from raylens.deployments.deployment_versions import versioned
from raylens.deployments.endpoint.ingress import REQUESTS, Ingress
from raylens.deployments.item_store.store import SharedState
from raylens.deployments.placement import reserved
from raylens.deployments.ray_internals.start_worker import FORKED
from raylens.deployments.routing.prefix_router import PrefixRouter
from raylens.deployments.routing.room_router import RoomRouter, room_routing
from raylens.deployments.routing.work_scaling import scaling
from raylens.deployments.stages.encode_stage import BATCHES, Encode
from raylens.deployments.stages.generate_stage import PROMPT_TOKENS, USAGE, Generate
from raylens.deployments.stages.preprocess_stage import PIXELS, Preprocess
from raylens.deployments.stages.process_setup import MALLOC_VARIABLES
from raylens.deployments.stages.stage_calls import StageHandles

_PREPROCESS_ITEMS = 16  # in a replica: one is processed while the next ones travel
_ENCODE_ITEMS = 64  # in a replica: several batches, so that no batch waits for items to travel
_GENERATE_REQUESTS = 256  # in a replica, unless its engine runs more: the engine orders its queue better than Serve
_NOTICE_SECONDS = 2.0
_NOTICE_SHARE = 1 / 16
"""Grace period: an idle replica keeps accepting requests this long after it was told to stop, for routers that have not
heard yet; at most this share of the drain time, so that a server on one machine ends quickly."""
_NUM_RESULTS = {"process_item": 2, "render": 1, "encode": 2}
"""Methods of the stages whose results are handed on before they exist."""
_TARGETS = {
    REQUESTS: 100.0,  # open requests, mostly streams
    PIXELS: 17e6,  # two 4K images
    BATCHES: 4.0,  # full batches, running or waiting
    PROMPT_TOKENS: 8192.0,  # waiting
    USAGE: 0.8,  # of the KV cache or of `max_num_seqs`, whichever is higher
}
"""Scaling targets per replica, before `scaling.target_load`."""
_HEARTBEATS = 64  # room in a replica: each ingress has one in flight
_MOST_HTTP_CALLS = 2**16
"""Ray Serve admits all HTTP requests to an ingress replica. HAProxy limits connections, admission limits requests."""
_ERROR_EVENT_SECONDS = 2.0
"""Extra drain time of the ingress, to end its open streams with error events after Ray Serve has killed the stages."""


def build_app(config: AppConfig) -> Application:
    """Builds the application of `config` for `serve.run`. `serve.yaml` names this function as its import path."""
    stages = {suffix: _stages(own, suffix) for suffix, own in config.by_suffix().items()}
    shards = [
        # One deployment per shard, because an ingress addresses a specific shard.
        _deployment(SharedState, config, name=f"Shared-{number}", ray_actor_options=_small_process(config.shared)).bind(
            config, number, stages
        )
        for number in range(config.shared.shards)
    ]
    return _deployment(
        serve.ingress()(Ingress),
        config,
        name="Ingress",
        ray_actor_options=_small_process(config.ingress),
        max_ongoing_requests=_MOST_HTTP_CALLS,
        graceful_shutdown_timeout_s=config.updates.drain_seconds + _ERROR_EVENT_SECONDS,
        **_scaling(config, config.ingress, [REQUESTS]),
    ).bind(config, stages, *shards)


def _stages(config: AppConfig, suffix: str) -> StageHandles:
    """Returns one model's stages. `suffix` ends their names, see `AppConfig.by_suffix`."""
    most_items = config.admission.total.requests * (1 + config.media.limits.max_items)
    preprocess: Any = _deployment(
        Preprocess,
        config,
        name=f"Preprocess{suffix}",
        ray_actor_options=_process(config.preprocess),
        # Items wait for a replica with few of them. Prompts overtake them, because each takes only a millisecond.
        max_ongoing_requests=most_items,
        request_router_config=room_routing(limits={"process_item": _PREPROCESS_ITEMS}, num_results=_NUM_RESULTS),
        **_scaling(config, config.preprocess, [PIXELS]),
    ).bind(config)
    generate: Any = _generate(config, suffix, most_items)
    encoders: dict[str, Any] = {} if config.encode.placement == "separate" else {"generate": generate}
    if config.encode.placement != "inline":
        encoders["encode"] = _deployment(
            Encode,
            config,
            name=f"Encode{suffix}",
            ray_actor_options=_process(config.encode),
            **_limited("encode", _ENCODE_ITEMS, RoomRouter),
            **_scaling(config, config.encode, [BATCHES]),
        ).bind(config)
    return StageHandles(preprocess, generate, encoders)


def _generate(config: AppConfig, suffix: str, most_items: int) -> Application:
    settings = config.generate
    if config.encode.placement == "separate":
        room = _limited("generate", max(_GENERATE_REQUESTS, settings.engine.max_num_seqs or 0), PrefixRouter)
    else:
        # Requests wait for items that the same replicas encode, so all requests and all items need room.
        routing = room_routing(PrefixRouter, num_results=_NUM_RESULTS)
        room = {"max_ongoing_requests": most_items, "request_router_config": routing}
    units = [PROMPT_TOKENS, USAGE, *([BATCHES] if config.encode.placement == "inline" else [])]
    return _deployment(
        Generate,
        config,
        name=f"Generate{suffix}",
        ray_actor_options=_process(settings),
        **room,
        **_scaling(config, settings, units),
        **_bundles(settings),
    ).bind(config)


def _deployment(replica: type[Any], config: AppConfig, *, name: str, **options: Any) -> serve.Deployment:
    """Returns a deployment with its version and its options for health checks, updates and shutdown."""
    defaults = {
        "health_check_period_s": 1.0,  # Ray Serve's default of 10 s delays the replacement of a dead replica
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": config.updates.drain_seconds,
        "graceful_shutdown_wait_loop_s": min(_NOTICE_SECONDS, _NOTICE_SHARE * config.updates.drain_seconds),
        "max_surge_percent": config.updates.max_surge_percent,
    }
    return versioned(serve.deployment(replica, name=name, **(defaults | options)), config)


def _limited(method: str, limit: int, router: type[RoomRouter]) -> dict[str, Any]:
    """Returns the options of a replica that takes `limit` calls of `method`; heartbeats overtake waiting calls."""
    routing = room_routing(router, limits={method: limit}, num_results=_NUM_RESULTS)
    return {"max_ongoing_requests": limit + _HEARTBEATS, "request_router_config": routing}


def _scaling(config: AppConfig, stage: ScaledConfig, units: Iterable[str]) -> dict[str, Any]:
    return scaling(
        at_least=stage.min_replicas,
        at_most=stage.max_replicas,
        targets={unit: _TARGETS[unit] * config.scaling.target_load for unit in units},
        down_delay_s=config.scaling.downscale_delay_s,
    )


def _small_process(settings: ProcessConfig) -> dict[str, Any]:
    """Returns the Ray options of a process without computation. On one machine it is forked from the template."""
    environment = {"env_vars": MALLOC_VARIABLES | {FORKED: "1"}}
    return {"num_cpus": settings.num_cpus, "resources": settings.resources, "runtime_env": environment}


def _process(settings: StageConfig) -> dict[str, Any]:
    """Returns the Ray options of a stage's process. Only a stage with the template's number of threads is forked."""
    num_gpus = reserved(settings).get("GPU", 0)
    can_fork = num_gpus == 0 and max(1, int(settings.num_cpus)) == NUM_THREADS
    variables = MALLOC_VARIABLES | ({FORKED: "1"} if can_fork else {})
    return {**_small_process(settings), "num_gpus": num_gpus, "runtime_env": {"env_vars": variables}}


def _bundles(settings: GenerateConfig) -> dict[str, Any]:
    """Returns a bundle per rank, the replica's own first; Ray packs them onto as few nodes as possible."""
    if settings.tensor_parallel_size == 1:
        return {}
    return {
        "placement_group_bundles": [dict(reserved(settings))] * settings.tensor_parallel_size,
        "placement_group_strategy": "PACK",
    }
