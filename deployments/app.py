"""Builds the Ray Serve application: which deployment gets what, and which handle goes where."""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from deployments.config import AppConfig, EncodeConfig, GenerateConfig, IngressConfig, PreprocessConfig, SharedConfig
from deployments.endpoint.ingress import Ingress
from deployments.shared.shared_state import SharedState
from deployments.stages.encode_stage import Encode
from deployments.stages.free_memory import MALLOC_VARIABLES
from deployments.stages.generate_stage import Generate
from deployments.stages.pixel_scaling import pixel_scaling
from deployments.stages.preprocess_stage import Preprocess
from deployments.stages.rendezvous_router import rendezvous_routing
from deployments.start_worker import FORKED
from deployments.worker_template import NUM_THREADS


def build_app(config: AppConfig) -> Application:
    """Builds the application of `config`, ready for `serve.run`. `serve.yaml` names this function as its import
    path."""
    most_items = config.admission.total.requests * (1 + config.media.limits.max_items)
    preprocess = serve.deployment(
        Preprocess,
        name="Preprocess",
        ray_actor_options=_process(config.preprocess),
        # Items wait for a replica that has few of them. Prompts go past them: each takes a millisecond.
        max_ongoing_requests=most_items,
        autoscaling_config=AutoscalingConfig(
            min_replicas=config.preprocess.min_replicas,
            max_replicas=config.preprocess.max_replicas,
            upscale_delay_s=3.0,
            downscale_delay_s=60.0,
            metrics_interval_s=1.0,
            look_back_period_s=3.0,
            policy=pixel_scaling(config.preprocess.target_megapixels),
        ),
        request_router_config=rendezvous_routing(limits={"process_item": config.preprocess.max_ongoing_items}),
        **_lifetime(config),
    ).bind(config)
    if config.encoder == "inline":
        # Requests wait for items that the same replicas encode, so all requests and all items have to find room.
        generate = _engine_stage(
            Generate,
            config,
            config.generate.model_copy(update={"max_ongoing_requests": most_items}),
            request_router_config=rendezvous_routing(),
            **_bundles(config.generate),
        )
        encode = generate
    else:
        encode = _engine_stage(Encode, config, config.encode, request_router_config=rendezvous_routing())
        generate = _engine_stage(Generate, config, config.generate, **_bundles(config.generate))
    shards = [_shard(config, number).bind(config, number, preprocess, encode) for number in range(config.shared.shards)]
    return serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=config.ingress.num_replicas,
        ray_actor_options=_small_process(config.ingress),
        max_ongoing_requests=config.max_ingress_calls,
        **_lifetime(config),
    ).bind(config, preprocess, encode, generate, *shards)


def _lifetime(config: AppConfig) -> dict[str, Any]:
    """Returns how Ray Serve watches, replaces and stops replicas."""
    return {
        "health_check_period_s": 1.0,  # its default takes 10 s to notice a dead replica
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": config.updates.drain_seconds,
        "max_surge_percent": config.updates.max_surge_percent,
    }


def _shard(config: AppConfig, number: int) -> serve.Deployment:
    """Each shard is a deployment of its own, since an ingress has to know which one it asks."""
    return serve.deployment(
        SharedState,
        name=f"Shared-{number}",
        ray_actor_options=_small_process(config.shared),
        **_lifetime(config),
    )


def _engine_stage(
    stage: type[Encode] | type[Generate], config: AppConfig, settings: EncodeConfig | GenerateConfig, **options: Any
) -> Application:
    return serve.deployment(
        stage,
        name=stage.__name__,
        num_replicas=settings.num_replicas,
        ray_actor_options=_process(settings),
        max_ongoing_requests=settings.max_ongoing_requests,
        **_lifetime(config),
        **options,
    ).bind(config)


def _small_process(settings: IngressConfig | SharedConfig) -> dict[str, Any]:
    """Returns how Ray starts a process that computes nothing."""
    variables = {"env_vars": MALLOC_VARIABLES}
    return {"num_cpus": settings.num_cpus, "resources": settings.resources, "runtime_env": variables}


def _process(settings: PreprocessConfig | EncodeConfig | GenerateConfig) -> dict[str, Any]:
    """Returns how Ray starts a process of a stage: on one machine it is forked from the template that fits it."""
    num_gpus = 0 if isinstance(settings, PreprocessConfig) else settings.num_gpus
    can_fork = num_gpus == 0 and max(1, int(settings.num_cpus)) == NUM_THREADS
    variables = MALLOC_VARIABLES | ({FORKED: "1"} if can_fork else {})
    return {
        "num_cpus": settings.num_cpus,
        "num_gpus": num_gpus,
        "resources": settings.resources,
        "runtime_env": {"env_vars": variables},
    }


def _bundles(settings: GenerateConfig) -> dict[str, Any]:
    """Returns a bundle for each rank, the replica's own first; Ray packs them on as few nodes as it can."""
    if settings.tensor_parallel_size == 1:
        return {}
    reserved = {"CPU": settings.num_cpus, "GPU": settings.num_gpus, **settings.resources}
    bundle = {name: amount for name, amount in reserved.items() if amount}
    return {
        "placement_group_bundles": [bundle] * settings.tensor_parallel_size,
        "placement_group_strategy": "PACK",
    }
