"""Handles of the stages of one model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ray.serve.handle import DeploymentHandle


class StageHandles(NamedTuple):
    """`encoders`: the encoding stages by name (`encode`, `generate`, or both); of equals the first is used. While the
    application is built, deployments stand in for their handles."""

    preprocess: DeploymentHandle[Any]
    generate: DeploymentHandle[Any]
    encoders: Mapping[str, DeploymentHandle[Any]]

    def all(self) -> list[DeploymentHandle[Any]]:
        return [self.preprocess, self.generate, *self.encoders.values()]
