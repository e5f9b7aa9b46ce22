"""Which settings start which deployments anew, and which of them Ray Serve applies while replicas run."""

from itertools import chain
from typing import Any

import pytest
from ray.serve import Application
from ray.serve.generated.serve_pb2 import DeploymentConfig as SentConfig

from raylens.deployments.app import build_app
from raylens.deployments.config import AppConfig
from raylens.deployments.deployment_versions import version_of

ALL = {"Ingress", "Shared-0", "Preprocess", "Encode", "Generate"}
NO_RESTART: list[dict[str, Any]] = [
    {"updates": {"drain_seconds": 1}},
    {"preprocess": {"max_replicas": 5}},
    {"encode": {"max_replicas": 2}},
    {"generate": {"max_replicas": 3}},
]
RESTARTS: list[tuple[dict[str, Any], set[str]]] = [
    ({"admission": {"max_queued_requests": 1}}, {"Ingress"}),
    ({"auth": {"keys_file": "keys.yaml"}}, {"Ingress"}),
    ({"ingress": {"max_replicas": 2}}, {"Ingress"}),
    ({"served_model_name": "other"}, {"Ingress"}),
    ({"scaling": {"downscale_delay_s": 1}}, {"Ingress"}),
    ({"uploads": {"max_bytes": 1}}, {"Shared-0"}),
    ({"preprocess": {"image_backend": "pil"}}, {"Shared-0", "Preprocess"}),
    ({"preprocess": {"video_frames": 8}}, {"Shared-0", "Preprocess"}),
    ({"preprocess": {"num_cpus": 0.5}}, {"Preprocess"}),
    ({"encode": {"tower": {"dtype": "bfloat16"}}}, {"Shared-0", "Preprocess", "Encode", "Generate"}),
    ({"encode": {"linear": "int8"}}, {"Shared-0", "Preprocess", "Encode", "Generate"}),
    ({"encode": {"placement": "inline"}}, ALL),
    ({"step_timeout_s": 1}, {"Encode", "Generate"}),
    ({"num_threads": 1}, {"Encode", "Generate"}),
    ({"generate": {"num_gpus": 1}}, {"Shared-0", "Preprocess", "Generate"}),
    ({"generate": {"max_replicas": 3}}, {"Ingress"}),
    ({"generate": {"engine": {"max_num_seqs": 3}}}, {"Generate"}),
    ({"media": {"limits": {"max_items": 3}}}, ALL),
    ({"max_model_len": 100}, ALL),
    ({"allow_longer_context": True}, ALL),
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


@pytest.mark.parametrize("placement", ["inline", "auto"])
def test_the_encoder_s_settings_concern_generate_where_it_encodes(placement: str) -> None:
    before = versions({"encode": {"placement": placement}})
    after = versions({"encode": {"placement": placement, "activation_bytes": 2**20}})
    assert before["Generate"] != after["Generate"]


def test_an_inline_encoder_is_on_generate_s_device() -> None:
    inline = {"encode": {"placement": "inline"}}
    before = versions(inline)
    on_gpu = versions(inline | {"generate": {"num_gpus": 1}})
    assert before["Preprocess"] != on_gpu["Preprocess"], "its dtype is that of the encoder's device"


def applications(ingress: Application) -> list[Application]:
    """The whole application's."""
    _, stages, *shards = ingress._bound_deployment.init_args
    return [ingress, *shards, *chain.from_iterable(own.all() for own in stages.values())]


def sent_versions(config: AppConfig) -> dict[str, str]:
    """By the names of deployments, what Ray Serve's controller gets."""
    sent = {}
    for application in applications(build_app(config)):
        deployment = application._bound_deployment.options(max_queued_requests=7)  # which copies its options
        options = deployment._deployment_config
        options.version = "of the whole file"
        read = SentConfig.FromString(options.to_proto_bytes())
        sent[deployment.name] = read.version
        assert read.max_queued_requests == 7
    return sent


def test_ray_serve_is_sent_the_deployments_own_versions() -> None:
    assert sent_versions(AppConfig()) == versions({})


STAGES = {"Preprocess", "Encode", "Generate"}
OF_TWO = ALL | {f"{stage}-two" for stage in STAGES}
TWO: dict[str, Any] = {"model": "a/two"}
CHANGES_OF_TWO: list[tuple[dict[str, Any], set[str]]] = [
    ({"revision": "v2"}, {"Ingress", "Shared-0"} | OF_TWO - ALL),
    ({"preprocess": {"image_backend": "pil"}}, {"Shared-0", "Preprocess-two"}),
    ({"preprocess": {"num_cpus": 0.5}}, {"Preprocess-two"}),
    ({"encode": {"linear": "int8"}}, {"Shared-0"} | OF_TWO - ALL),
    ({"step_timeout_s": 1}, {"Encode-two", "Generate-two"}),
    ({"encode": {"min_replicas": 0}}, {"Ingress"}),
    ({"generate": {"engine": {"max_num_seqs": 3}}}, {"Generate-two"}),
    ({"generate": {"max_replicas": 3}}, {"Ingress"}),
]


@pytest.mark.long
def test_a_further_model_restarts_no_other_model_s_stage() -> None:
    one, two, three = (
        sent_versions(AppConfig.model_validate({"further_models": models}))
        for models in ([], [TWO], [TWO, {"model": "a/three"}])
    )
    assert set(one) == ALL
    assert set(two) == OF_TWO
    assert {name for name in one if one[name] != two[name]} == {"Ingress", "Shared-0"}
    assert {name for name in two if two[name] != three[name]} == {"Ingress", "Shared-0"}


@pytest.mark.long
@pytest.mark.parametrize(("change", "names"), CHANGES_OF_TWO, ids=[str(change) for change, _ in CHANGES_OF_TWO])
def test_a_setting_of_a_further_model_restarts_whom_it_concerns(change: dict[str, Any], names: set[str]) -> None:
    before, after = (
        sent_versions(AppConfig.model_validate({"further_models": [model]})) for model in (TWO, {**TWO, **change})
    )
    assert {name for name in before if before[name] != after[name]} == names


@pytest.mark.long
def test_a_setting_of_the_first_model_restarts_no_stage_of_another() -> None:
    before, after = (
        sent_versions(AppConfig.model_validate({"further_models": [TWO], **change}))
        for change in ({}, {"model": "other", "dtype": "bfloat16"})
    )
    assert {name for name in before if before[name] != after[name]} == ALL
