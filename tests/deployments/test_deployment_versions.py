"""Which settings start which deployments anew, and which of them Ray Serve applies while replicas run."""

from collections.abc import Iterator
from typing import Any

import pytest
from ray.serve import Application
from ray.serve.generated.serve_pb2 import DeploymentConfig as SentConfig

from deployments.app import build_app
from deployments.config import AppConfig
from deployments.deployment_versions import version_of

ALL = {"Ingress", "Shared-0", "Preprocess", "Encode", "Generate"}
NO_RESTART: list[dict[str, Any]] = [
    {"updates": {"drain_seconds": 1}},
    {"preprocess": {"max_replicas": 5, "target_megapixels": 3, "max_ongoing_items": 3}},
    {"encode": {"target_batches": 1, "max_replicas": 2, "max_ongoing_requests": 3}},
    {"generate": {"max_replicas": 3, "target_usage": 0.1, "target_prompt_tokens": 10, "max_ongoing_requests": 3}},
]
RESTARTS: list[tuple[dict[str, Any], set[str]]] = [
    ({"admission": {"max_queued_requests": 1}}, {"Ingress"}),
    ({"auth": {"keys_file": "keys.yaml"}}, {"Ingress"}),
    ({"ingress": {"max_replicas": 2}}, {"Ingress"}),
    ({"served_model_name": "other"}, {"Ingress"}),
    ({"scaling": {"downscale_delay_s": 1}}, {"Ingress"}),
    ({"uploads": {"max_files": 1}}, {"Shared-0"}),
    ({"shared": {"max_names": 1}}, {"Shared-0"}),
    ({"preprocess": {"image_backend": "pil"}}, {"Shared-0", "Preprocess"}),
    ({"preprocess": {"niceness": 5}}, {"Preprocess"}),
    ({"encode": {"tower": {"dtype": "bfloat16"}}}, {"Shared-0", "Preprocess", "Encode", "Generate"}),
    ({"encode": {"step_timeout_s": 1}}, {"Encode"}),
    ({"generate": {"num_gpus": 1}}, {"Shared-0", "Preprocess", "Generate"}),
    ({"generate": {"max_replicas": 3}}, {"Ingress"}),
    ({"generate": {"engine": {"max_num_seqs": 3}}}, {"Generate"}),
    ({"media": {"limits": {"max_items": 3}}}, ALL),
    ({"max_model_len": 100}, ALL),
    ({"model": "other"}, ALL),
]


def versions(change: dict[str, Any]) -> dict[str, str]:
    config = AppConfig.model_validate(change)
    return {name: version_of(name, config) for name in ALL}


def restarted(change: dict[str, Any]) -> set[str]:
    before, after = versions({}), versions(change)
    return {name for name in ALL if before[name] != after[name]}


@pytest.mark.parametrize("change", NO_RESTART, ids=str)
def test_ray_serve_applies_these_to_running_replicas(change: dict[str, Any]) -> None:
    assert restarted(change) <= {"Ingress"}


@pytest.mark.parametrize(("change", "names"), RESTARTS, ids=[str(change) for change, _ in RESTARTS])
def test_a_setting_restarts_whom_it_concerns(change: dict[str, Any], names: set[str]) -> None:
    assert restarted(change) == names


@pytest.mark.parametrize("encoder", ["inline", "auto"])
def test_the_encoder_s_settings_concern_generate_where_it_encodes(encoder: str) -> None:
    before = versions({"encoder": encoder})
    after = versions({"encoder": encoder, "encode": {"activation_bytes": 2**20}})
    assert before["Generate"] != after["Generate"]


def test_an_inline_encoder_is_on_generate_s_device() -> None:
    inline = {"encoder": "inline"}
    before = versions(inline)
    on_gpu = versions(inline | {"generate": {"num_gpus": 1}})
    assert before["Preprocess"] != on_gpu["Preprocess"], "its dtype is that of the encoder's device"


def applications(application: Application) -> Iterator[Application]:
    yield application
    for argument in application._bound_deployment.init_args:
        for one in argument.values() if isinstance(argument, dict) else [argument]:
            if isinstance(one, Application):
                yield from applications(one)


def test_ray_serve_is_sent_the_deployments_own_versions() -> None:
    config = AppConfig()
    sent = {}
    for application in applications(build_app(config)):
        deployment = application._bound_deployment.options(max_queued_requests=7)  # which copies its options
        options = deployment._deployment_config
        options.version = "of the whole file"
        read = SentConfig.FromString(options.to_proto_bytes())
        sent[deployment.name] = read.version
        assert read.max_queued_requests == 7
    assert sent == versions({})
