"""How long the replicas of an application take to end."""

from typing import Any

import pytest

from raylens.deployments.app import build_app
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import on_one_machine


def notices(config: AppConfig) -> set[float]:
    """How long replicas without requests wait for late ones, of all deployments."""
    built: Any = build_app(config)
    _, models, *shards = built._bound_deployment.init_args
    apps = [built, *shards, models[""].preprocess, models[""].generate, *models[""].encoders.values()]
    return {one._bound_deployment._deployment_config.graceful_shutdown_wait_loop_s for one in apps}


@pytest.mark.parametrize(("chosen", "alone"), [({}, 0.5), ({"drain_seconds": 99}, 2.0)])
def test_replicas_of_one_machine_end_sooner_if_nothing_else_is_set(
    shapes: str, chosen: dict[str, float], alone: float
) -> None:
    config = AppConfig.model_validate({"model": shapes, "updates": chosen})
    assert notices(config) == {2.0}
    assert notices(on_one_machine(config)) == {alone}
