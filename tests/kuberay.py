"""The part of KubeRay's API that kubernetes/rayservice.yaml uses: which fields there are, and of what type.

It was compared with the schema of KubeRay 1.7.0 when it was written. Pod templates are Kubernetes' own."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class AuthOptions(_Strict):
    mode: Literal["disabled", "token"] = "token"
    secret_name: str | None = None


class GcsEmbeddedStorage(_Strict):
    claim_name: str | None = None
    size: str | None = None
    storage_class_name: str | None = None
    access_modes: list[str] | None = None
    sub_path: str | None = None
    deletion_policy: Literal["DeleteWithCluster", "Retain"] = "DeleteWithCluster"


class GcsFaultToleranceOptions(_Strict):
    """Only with `rocksdb`, for which there are no other fields."""

    backend: Literal["rocksdb"]
    storage: GcsEmbeddedStorage | None = None


class AutoscalerOptions(_Strict):
    version: Literal["v1", "v2"] | None = None
    idle_timeout_seconds: int | None = None
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"] | None = None
    resources: dict[str, Any] | None = None
    security_context: dict[str, Any] | None = None


class HeadGroupSpec(_Strict):
    template: dict[str, Any]
    ray_start_params: dict[str, str]
    resources: dict[str, str] = {}
    labels: dict[str, str] = {}


class WorkerGroupSpec(HeadGroupSpec):
    group_name: str
    replicas: int = Field(0, ge=0)
    min_replicas: int = Field(ge=0)
    max_replicas: int = Field(ge=0)
    idle_timeout_seconds: int | None = None
    priority: int = 0


class RayClusterSpec(_Strict):
    ray_version: str
    auth_options: AuthOptions | None = None
    gcs_fault_tolerance_options: GcsFaultToleranceOptions | None = None
    enable_in_tree_autoscaling: bool = False
    autoscaler_options: AutoscalerOptions | None = None
    head_group_spec: HeadGroupSpec
    worker_group_specs: list[WorkerGroupSpec] = []


class UpgradeStrategy(_Strict):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]


class RayServiceSpec(_Strict):
    serve_config_v2: str
    ray_cluster_config: RayClusterSpec
    exclude_head_pod_from_serve_svc: bool = False
    ray_cluster_deletion_delay_seconds: int | None = Field(None, ge=0)
    upgrade_strategy: UpgradeStrategy | None = None


class Metadata(_Strict):
    name: str = Field(max_length=53, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class RayService(_Strict):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


def read_ray_service(document: dict[str, Any]) -> RayService:
    """Raises pydantic's ValidationError, which names each field that is unknown, missing or of another type."""
    return RayService.model_validate(document)
