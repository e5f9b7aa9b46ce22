"""serve.yaml and the settings behind it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.config import AppConfig
from deployments.local_cluster import LOGGING
from deployments.ray_environment import RAY_ENVIRONMENT
from deployments.stages.encode_stage import part_config
from deployments.stages.preprocess_stage import pipeline_choice
from modeling.packed_linear import packable_dtypes

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = yaml.safe_load((ROOT / "serve.yaml").read_text())


def test_serve_yaml_shows_every_setting_with_its_default() -> None:
    (application,) = DOCUMENT["applications"]
    assert application["args"] == AppConfig().model_dump(mode="json")


def test_serve_yaml_is_a_serve_config() -> None:
    ServeDeploySchema.model_validate(DOCUMENT)
    (application,) = DOCUMENT["applications"]
    assert application["runtime_env"]["env_vars"].items() <= RAY_ENVIRONMENT.items()


def test_replicas_log_the_same_on_a_cluster_as_on_one_machine() -> None:
    (application,) = DOCUMENT["applications"]
    assert application["logging_config"] == LOGGING


def fields(model: Any) -> list[tuple[str, Any]]:
    """Of a class of settings and of all those that it holds, also of the libraries' dataclasses."""
    found = []
    for name, field in model.__pydantic_fields__.items():
        if hasattr(field.annotation, "__pydantic_fields__"):
            found += fields(field.annotation)
        else:
            found.append((f"{model.__name__}.{name}", field))
    return found


@pytest.mark.parametrize(("name", "field"), fields(AppConfig))
def test_every_setting_is_described(name: str, field: Any) -> None:
    assert field.description, name


@pytest.mark.parametrize(
    "settings",
    [
        {"modle": "x"},
        {"generate": {"engine": {"block_sise": 16}}},
        {"generate": {"engine": {"block_size": 0}}},
        {"media": {"limits": {"max_items": -1}}},
        {"media": {"limits": {"video": {"max_frame": 1}}}},
        {"media": {"fetch": {"total_timeout_s": 0}}},
        {"dtype": "int4"},
        {"preprocess": {"num_cpus": -1}},
        {"generate": {"engine": {"max_num_batched_tokens": 8, "max_num_seqs": 9}}},
        {"generate": {"tensor_parallel_size": 0}},
        {"generate": {"tensor_parallel_size": 2, "num_cpus": 0}},
        {"generate": {"tensor_parallel_size": 2, "num_gpus": 0.5}},
        {"generate": {"tensor_parallel_size": 2, "engine": {"quantization": "int8"}}},
        {"generate": {"tensor_parallel_size": 2, "engine": {"max_loras": 1}, "adapters_folder": "/adapters"}},
        {"generate": {"engine": {"max_loras": 1}}},
        {"generate": {"adapters_folder": "/adapters"}},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AppConfig.model_validate(settings)


def test_dtypes_follow_the_device() -> None:
    assert (AppConfig().dtype_name("cpu"), AppConfig().dtype_name("cuda")) == ("float32", "bfloat16")
    assert AppConfig(dtype="float16").dtype_name("cpu") == "float16"


def test_tower_and_projector_go_where_they_are_told() -> None:
    config = AppConfig.model_validate(
        {"encode": {"num_gpus": 0.2, "tower": {"dtype": "float16"}, "projector": {"device": "cpu"}}}
    )
    tower, projector = config.encode.tower, config.encode.projector
    assert (config.part_device(tower), config.part_dtype_name(tower)) == ("cuda", "float16")
    assert (config.part_device(projector), config.part_dtype_name(projector)) == ("cpu", "float32")


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_gpus", [0, 1])
def test_every_dtype_has_linear_layers_on_either_device(dtype: str, num_gpus: int) -> None:
    config = AppConfig.model_validate({"dtype": dtype, "encode": {"num_gpus": num_gpus}})
    part = part_config(config, config.encode.tower)
    assert part.linear == ("packed" if not num_gpus and part.dtype in packable_dtypes() else "plain")


@pytest.mark.parametrize(
    ("tower", "bits"),
    [({"dtype": "float32"}, 32), ({"dtype": "bfloat16"}, 16), ({"dtype": "float16"}, 16), ({"linear": "int8"}, 8)],
)
def test_a_multimodal_pipeline_is_told_where_and_how_precisely_to_compute(tower: dict[str, str], bits: int) -> None:
    settings = {"encode": {"num_gpus": 1, "tower": tower, "projector": {"device": "cpu"}}}
    choice = pipeline_choice(AppConfig.model_validate({"multimodal_pipeline": {"name": "eyes"}, **settings}))
    assert choice is not None
    assert choice.params == {
        "vision_device": "cuda",
        "vision_bits": bits,
        "projector_device": "cpu",
        "projector_bits": 32,
    }
    assert pipeline_choice(AppConfig.model_validate(settings)) is None


def test_an_inline_encoder_is_where_the_language_model_is() -> None:
    config = AppConfig.model_validate({"encoder": "inline", "generate": {"num_gpus": 1}, "encode": {"num_cpus": 7}})
    assert config.part_device(config.encode.tower) == "cuda"
    assert config.num_reserved_cpus == AppConfig().num_reserved_cpus - AppConfig().encode.num_cpus


def test_every_rank_reserves_its_cpus() -> None:
    one, two = (AppConfig.model_validate({"generate": {"tensor_parallel_size": n, "num_cpus": 1.5}}) for n in (1, 2))
    assert two.num_reserved_cpus - one.num_reserved_cpus == 1.5
