"""serve.yaml and the settings behind it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

import encoder.models
import llm.models
import preprocess.models
from deployments.cli import ConfigError, load_config
from deployments.config import SERVED_FAMILIES, AppConfig
from deployments.encode_stage import part_config
from deployments.local_cluster import RAY_ENVIRONMENT
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


def fields(model: type[BaseModel]) -> list[tuple[str, Any]]:
    found = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
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
        {"generate": {"block_sise": 16}},
        {"generate": {"block_size": 0}},
        {"dtype": "int4"},
        {"preprocess": {"num_cpus": -1}},
        {"generate": {"max_num_batched_tokens": 8, "max_num_seqs": 9}},
        {"generate": {"tensor_parallel_size": 0}},
        {"generate": {"tensor_parallel_size": 2, "num_cpus": 0}},
        {"generate": {"tensor_parallel_size": 2, "num_gpus": 0.5}},
        {"generate": {"tensor_parallel_size": 2, "quantization": "int8"}},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AppConfig.model_validate(settings)


def write(folder: Path, text: str) -> Path:
    path = folder / "serve.yaml"
    path.write_text(text)
    return path


def test_the_command_line_goes_before_the_file(tmp_path: Path, shapes: str) -> None:
    path = write(tmp_path, "applications: [{args: {model: other/model, generate: {block_size: 8}}}]")
    config = load_config(path, shapes)
    assert (config.model, config.generate.block_size, config.model_name) == (shapes, 8, "shapes")
    assert load_config(path, None).model == "other/model"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: [{args: {generate: {block_sise: 8}}}]", r"serve.yaml: generate\.block_sise: Extra"),
        ("applications: []", "not a Serve config file"),
        ("just text", "not a Serve config file"),
        ("a: [", "not a Serve config file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml", None)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "one-word"])
def test_a_model_that_cannot_be_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_config(None, model)


def test_a_folder_without_a_supported_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        load_config(None, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"'bert' is not supported, only \['aria'"):
        load_config(None, str(tmp_path))


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


def test_an_inline_encoder_is_where_the_language_model_is() -> None:
    config = AppConfig.model_validate({"encoder": "inline", "generate": {"num_gpus": 1}, "encode": {"num_cpus": 7}})
    assert config.part_device(config.encode.tower) == "cuda"
    assert config.num_reserved_cpus == AppConfig().num_reserved_cpus - AppConfig().encode.num_cpus


def test_the_served_families_are_those_of_every_stage() -> None:
    families = set(encoder.models.FAMILIES) & set(llm.models.FAMILIES) & set(preprocess.models.FAMILIES)
    assert families == SERVED_FAMILIES


def test_every_rank_reserves_its_cpus() -> None:
    one, two = (AppConfig.model_validate({"generate": {"tensor_parallel_size": n, "num_cpus": 1.5}}) for n in (1, 2))
    assert two.num_reserved_cpus - one.num_reserved_cpus == 1.5
