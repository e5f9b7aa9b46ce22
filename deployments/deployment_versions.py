"""Maps settings to deployments: a deployment's version is a hash of the settings that its replicas read.

Ray Serve restarts replicas when their version changes. Its own version is a hash of the whole file: any change would
restart every stage. No version has the settings of scaling and the limits of calls: Ray Serve applies these at once."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ray import serve

from raylens.deployments import config as settings
from raylens.deployments.ray_internals.deployment_version import with_version

_Excluded = Mapping[str, Any]  # excluded settings, in pydantic's form

_OF_RAY = {"min_replicas", "max_replicas"}  # for Ray Serve only
_OF_ENGINES: _Excluded = {"num_threads": True, "step_timeout_s": True}  # for Encode and Generate only
_ENDPOINT: _Excluded = {
    **dict.fromkeys(("served_model_name", "auth", "admission", "ingress"), True),
    "metrics": set(settings.MetricsConfig.model_fields) - {"port"},
}
_STAGE: _Excluded = {**_ENDPOINT, **dict.fromkeys(("updates", "scaling", "shared", "uploads", "further_models"), True)}
_PIXELS: _Excluded = {
    # The output of Preprocess depends on the encoder's dtype, and so on its device, which may be Generate's.
    "encode": set(settings.EncodeConfig.model_fields) - {"placement", "tower", "projector", "linear", "num_gpus"},
    "generate": set(settings.GenerateConfig.model_fields) - {"num_gpus"},
}
_INGRESS_MODEL: _Excluded = {
    **_OF_ENGINES,
    "preprocess": True,
    "encode": set(settings.EncodeConfig.model_fields) - {"placement", "min_replicas"},  # min_replicas 0 is no failure
    "generate": set(settings.GenerateConfig.model_fields) - {"max_replicas"},  # several replicas are chosen by prefixes
}
"""Model settings that the ingress does not read."""
_SHARED_MODEL: _Excluded = {
    **_PIXELS,  # the caches hold the results of Preprocess and Encode
    **_OF_ENGINES,
    "preprocess": set(settings.PreprocessConfig.model_fields) - {"image_backend", "video_frames"},
}
"""The same for the shards."""
_DOES_NOT_CONCERN: Mapping[str, _Excluded] = {
    # Replicas of the ingress are never reconfigured in place: Ray Serve removes a reconfiguring replica from HAProxy's
    # list, and a single one would leave no endpoint.
    "Ingress": {
        **_INGRESS_MODEL,
        "further_models": {"__all__": _INGRESS_MODEL},
        "uploads": True,
        "updates": True,
        "shared": set(settings.SharedConfig.model_fields) - {"shards"},
    },
    # A further model's name concerns the shards, too, because it selects the model's stages.
    "Shared": {
        **_ENDPOINT,
        **_SHARED_MODEL,
        "further_models": {"__all__": _SHARED_MODEL},
        "updates": True,
        "scaling": True,
    },
    "Preprocess": {**_STAGE, **_PIXELS, **_OF_ENGINES, "preprocess": _OF_RAY},
    "Encode": {**_STAGE, "preprocess": True, "encode": _OF_RAY, "generate": True},
    "Generate": {**_STAGE, **_PIXELS, "preprocess": True, "generate": _OF_RAY},
}
"""Per deployment: settings whose change does not restart its replicas. All other settings concern every deployment."""
_INLINE: Mapping[str, _Excluded] = {"Generate": {**_DOES_NOT_CONCERN["Generate"], "encode": _OF_RAY}}
"""The same if Generate encodes."""


def versioned(deployment: serve.Deployment, config: settings.AppConfig) -> serve.Deployment:
    return with_version(deployment, version_of(deployment.name, config))


def version_of(name: str, config: settings.AppConfig) -> str:
    """Returns a hash of the deployment's settings, 32 hex digits. `config`: for a stage, see `AppConfig.of`."""
    kind = name.partition("-")[0]
    excluded: Any = ({} if config.encode.placement == "separate" else _INLINE).get(kind, _DOES_NOT_CONCERN[kind])
    concerning = config.model_dump(mode="json", exclude=excluded)
    return hashlib.sha256(json.dumps(concerning, sort_keys=True).encode()).hexdigest()[:32]
