"""Which settings concern which deployment. Ray Serve starts a deployment's replicas anew when its version changes.

By itself Ray Serve gives all deployments one version, a hash of the whole file: any other argument would start every
stage anew, load every model and empty every cache. Here a deployment's version is a hash of the settings that its
replicas read. Settings of scaling and limits of calls, which only Ray Serve reads, are part of no version: Ray Serve
applies them to the replicas that run."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ray import serve

from raylens.deployments.config import (
    AppConfig,
    EncodeConfig,
    GenerateConfig,
    MetricsConfig,
    PreprocessConfig,
    SharedConfig,
)
from raylens.deployments.ray_internals.deployment_version import with_version

_Excluded = Mapping[str, Any]
"""What is left out of settings, in pydantic's form."""

_OF_RAY = {"min_replicas", "max_replicas"}
"""What only Ray Serve reads of the settings of a stage."""
_OF_ENGINES: _Excluded = {"num_threads": True, "step_timeout_s": True}
"""What only Encode and Generate read of the settings of a model."""
_ENDPOINT: _Excluded = {"served_model_name": True, "auth": True, "admission": True, "ingress": True}
_GOALS: _Excluded = {"metrics": set(MetricsConfig.model_fields) - {"port"}}
"""What only the ingress reads of the settings of metrics."""
_STAGE: _Excluded = {
    **_ENDPOINT,
    **_GOALS,
    "updates": True,
    "scaling": True,
    "shared": True,
    "uploads": True,
    "further_models": True,
}
_PIXELS: _Excluded = {
    # What Preprocess makes depends on the dtype that Encode takes, and so on its device. An inline encoder has that of
    # Generate.
    "encode": set(EncodeConfig.model_fields) - {"placement", "tower", "projector", "linear", "num_gpus"},
    "generate": set(GenerateConfig.model_fields) - {"num_gpus"},
}
_INGRESS_MODEL: _Excluded = {
    **_OF_ENGINES,
    "preprocess": True,
    "encode": set(EncodeConfig.model_fields) - {"placement", "min_replicas"},  # none at rest is no failure
    "generate": set(GenerateConfig.model_fields) - {"max_replicas"},  # of several, prefixes choose
}
"""What the ingress does not read of the settings of a model."""
_SHARED_MODEL: _Excluded = {
    # The caches hold what Preprocess and Encode have made with their settings.
    **_PIXELS,
    **_OF_ENGINES,
    "preprocess": set(PreprocessConfig.model_fields) - {"image_backend", "video_frames"},
}
"""The same for the shards."""
_DOES_NOT_CONCERN: Mapping[str, _Excluded] = {
    # A replica of the endpoint is replaced, never changed in place: Ray Serve takes one that is being changed out of
    # HAProxy's list, and the only one would leave nobody who answers.
    "Ingress": {
        **_INGRESS_MODEL,
        "further_models": {"__all__": _INGRESS_MODEL},
        "uploads": True,
        "updates": True,
        "shared": set(SharedConfig.model_fields) - {"shards"},
    },
    # The name of a further model concerns the shards, too: its stages are called by it.
    "Shared": {
        **_ENDPOINT,
        **_GOALS,
        **_SHARED_MODEL,
        "further_models": {"__all__": _SHARED_MODEL},
        "updates": True,
        "scaling": True,
    },
    "Preprocess": {**_STAGE, **_PIXELS, **_OF_ENGINES, "preprocess": _OF_RAY},
    "Encode": {**_STAGE, "preprocess": True, "encode": _OF_RAY, "generate": True},
    "Generate": {**_STAGE, **_PIXELS, "preprocess": True, "generate": _OF_RAY},
}
"""By the first part of a deployment's name, what may change without its replicas being started anew. A setting that is
not named here concerns every deployment."""
_INLINE: Mapping[str, _Excluded] = {"Generate": {**_DOES_NOT_CONCERN["Generate"], "encode": _OF_RAY}}
"""The same where Generate encodes."""


def versioned(deployment: serve.Deployment, config: AppConfig) -> serve.Deployment:
    """Returns the deployment with the version that the settings give it."""
    return with_version(deployment, version_of(deployment.name, config))


def version_of(name: str, config: AppConfig) -> str:
    """Returns the version of the deployment `name`: a hash of the settings that concern it, 32 hex digits. Those of a
    stage are in the `config` of its own model, see `AppConfig.of`."""
    kind = name.partition("-")[0]
    excluded: Any = ({} if config.encode.placement == "separate" else _INLINE).get(kind, _DOES_NOT_CONCERN[kind])
    concerning = config.model_dump(mode="json", exclude=excluded)
    return hashlib.sha256(json.dumps(concerning, sort_keys=True).encode()).hexdigest()[:32]
