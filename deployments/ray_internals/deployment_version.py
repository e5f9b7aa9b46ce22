"""A deployment with a version of its own.

Ray 2.60: Ray Serve starts a deployment's replicas again when its version changes. It gives all deployments of an
application one version, a hash of the whole application in the config file. It has removed its own argument for the
version: `Deployment.options(version=...)` raises ValueError.

Needed: a changed setting restarts the stages that read it, and no other (`deployments/deployment_versions.py`).

Test: `tests/deployments/test_deployment_versions.py`, `test_ray_serve_is_sent_the_deployments_own_versions`;
`tests/deployments/test_updates.py` updates a running application.

Way back: a public argument for the version. ray-project/ray#27444 brought versions by deployment for what a config file
says of each; the arguments of the application builder belong to all of them."""

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
    """Ray Serve's options of a deployment. They keep their own version when Ray Serve sets another on the way to its
    controller."""

    _own_version: str = PrivateAttr()

    def to_proto(self) -> Any:
        self.version = self._own_version
        return super().to_proto()
