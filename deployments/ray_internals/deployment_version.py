"""A deployment with a version of its own.

Ray 2.60: Ray Serve restarts a deployment's replicas when its version changes. It gives all deployments one version, a
hash of the whole application in the config file, and `Deployment.options(version=...)` raises ValueError.
Needed: a changed setting restarts only the stages that read it (`deployments/deployment_versions.py`).
Test: `tests/deployments/test_deployment_versions.py`, `test_ray_serve_is_sent_the_deployments_own_versions`;
`tests/deployments/test_updates.py` updates a running application.
Way back: a public argument for the version. ray-project/ray#27444 covers a config file's own fields only."""

from typing import Any

from pydantic import PrivateAttr
from ray import serve
from ray.serve._private.config import DeploymentConfig


def with_version(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """Returns the deployment, which keeps the version whatever Ray Serve sets."""
    config = deployment._deployment_config
    own = _VersionedConfig.model_construct(config.model_fields_set, **dict(config))
    own._own_version = version
    deployment._deployment_config = own
    return deployment


class _VersionedConfig(DeploymentConfig):
    """Ray Serve's options of a deployment, with a version that Ray Serve cannot change on the way to its controller."""

    _own_version: str = PrivateAttr()

    def to_proto(self) -> Any:
        self.version = self._own_version
        return super().to_proto()
