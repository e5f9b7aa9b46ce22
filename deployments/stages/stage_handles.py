"""Handles of the stages of one model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ray.serve.handle import DeploymentHandle


class StageHandles(NamedTuple):
    """`encoders`: the stages that encode items, by their names: `encode`, `generate`, or both. The first one of equals
    is taken. While the application is built, its deployments stand where their handles will be."""

    preprocess: DeploymentHandle[Any]
    generate: DeploymentHandle[Any]
    encoders: Mapping[str, DeploymentHandle[Any]]

    def all(self) -> list[DeploymentHandle[Any]]:
        return [self.preprocess, self.generate, *self.encoders.values()]
