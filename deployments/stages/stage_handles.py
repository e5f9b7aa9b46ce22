"""Handles of the stages of one model."""

from typing import Any, NamedTuple

from ray.serve.handle import DeploymentHandle


class StageHandles(NamedTuple):
    """Where `encoder` is inline, `encode` is the handle of Generate. While the application is built, its deployments
    stand where their handles will be."""

    preprocess: DeploymentHandle[Any]
    encode: DeploymentHandle[Any]
    generate: DeploymentHandle[Any]
