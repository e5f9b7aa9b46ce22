"""serve.yaml and the settings behind it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from raylens.deployments.config import AppConfig, ModelConfig
from raylens.deployments.launch.local_cluster import LOGGING
from raylens.deployments.ray_internals.environment import RAY_ENVIRONMENT
from raylens.deployments.stages.encode_stage import part_config
from raylens.deployments.stages.preprocess_stage import plugin_choice
from raylens.modeling.packed_linear import packable_dtypes

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


@pytest.mark.parametrize(("name", "field"), [*fields(AppConfig), *fields(ModelConfig)])
def test_every_setting_is_described(name: str, field: Any) -> None:
    assert field.description, name


def single_fields(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields each field of each group of settings, alone in its groups."""
    for name, value in settings.items():
        for one in single_fields(value) if isinstance(value, dict) else [value]:
            yield {name: one}


def test_a_group_with_one_field_keeps_the_defaults_of_its_others() -> None:
    default = AppConfig()
    for settings in single_fields(default.model_dump()):
        assert AppConfig.model_validate(settings) == default, settings
    budget = AppConfig.model_validate({"admission": {"per_key": {"requests": 3}}}).admission.per_key
    assert budget == default.admission.per_key.model_copy(update={"requests": 3})


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
        {"generate": {"tensor_parallel_size": 2, "engine": {"async_scheduling": True}}},
        {"generate": {"num_gpus": 0.5, "engine": {"quantization": "int8"}}},
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
    ("encode", "bits"),
    [
        ({"tower": {"dtype": "float32"}}, (32, 32)),
        ({"tower": {"dtype": "bfloat16"}}, (16, 32)),
        ({"tower": {"dtype": "float16"}}, (16, 32)),
        ({"linear": "int8"}, (8, 8)),
    ],
)
def test_a_vision_plug_in_is_told_where_and_how_precisely_to_compute(
    encode: dict[str, Any], bits: tuple[int, int]
) -> None:
    settings = {"encode": {"num_gpus": 1, "projector": {"device": "cpu"}, **encode}}
    choice = plugin_choice(AppConfig.model_validate({"vision_plugin": {"name": "eyes"}, **settings}))
    assert choice is not None
    assert choice.params == {
        "vision_device": "cuda",
        "vision_bits": bits[0],
        "projector_device": "cpu",
        "projector_bits": bits[1],
    }
    assert plugin_choice(AppConfig.model_validate({"encode": {"num_gpus": 1}})) is None


def test_an_inline_encoder_is_where_the_language_model_is() -> None:
    config = AppConfig.model_validate({"generate": {"num_gpus": 1}, "encode": {"placement": "inline", "num_cpus": 7}})
    assert config.part_device(config.encode.tower) == "cuda"
    assert config.num_reserved_cpus == AppConfig().num_reserved_cpus - AppConfig().encode.num_cpus


def test_an_item_s_embeddings_do_not_depend_on_where_it_is_encoded() -> None:
    alike = {"encode": {"placement": "auto", "num_gpus": 0.2}, "generate": {"num_gpus": 1}}
    assert AppConfig.model_validate(alike).encoder_device == "cuda"
    with pytest.raises(
        ValueError, match=r"same kind of device .* encode\.num_gpus is 0\.0, but generate\.num_gpus 1\.0"
    ):
        AppConfig.model_validate(alike | {"encode": {"placement": "auto"}})


def test_the_docs_show_several_models_as_the_settings_take_them() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "http.md").read_text(), re.DOTALL)
    config = AppConfig.model_validate(yaml.safe_load(shown))
    assert [model.model_name for model in config.models] == ["llava-1.5-7b-hf", "qwen", "shapes"]
    assert set(config.by_suffix()) == {"", "-qwen", "-shapes"}


def test_two_models_of_one_name_are_refused() -> None:
    for further in (
        [{"model": "b/x"}],
        [{"model": "y", "served_model_name": "x"}],
        [{"model": "y"}, {"model": "z/y/"}],
    ):
        with pytest.raises(
            ValidationError, match="two models have the name '[xy]': give one another served_model_name"
        ):
            AppConfig.model_validate({"model": "a/x", "further_models": further})


def test_a_further_model_has_settings_of_its_own_and_those_of_the_endpoint() -> None:
    further = {"model": "b/y", "dtype": "bfloat16", "encode": {"num_gpus": 1}, "generate": {"num_cpus": 3}}
    config = AppConfig.model_validate(
        {
            "model": "a/x",
            "max_model_len": 100,
            "generate": {"num_cpus": 2},
            "updates": {"drain_seconds": 1},
            "further_models": [further],
        }
    )
    first, second = config.by_suffix().values()
    assert first == config.model_copy(update={"further_models": ()})
    assert second == AppConfig.model_validate({**further, "updates": {"drain_seconds": 1}})
    assert second.encoder_device == "cuda"
    alone = AppConfig().num_reserved_cpus
    assert config.num_reserved_cpus == alone + 1 + alone - 0.75 + 2
    for wrong in ({}, {"model": "b/y", "admission": {}}, {"model": "b/y", "generate": {"num_cpus": -1}}):
        with pytest.raises(ValidationError, match=r"further_models\.0\."):
            AppConfig.model_validate({"further_models": [wrong]})


def test_the_stages_of_different_models_never_have_one_name() -> None:
    names = ["a", "A", "a/b", "a%2Fb", "a-b", "a b", "a#b", "ä", "..", "-", "0", "x" * 300, "x" * 301, "ä" * 90]
    further = [{"model": "m", "served_model_name": name} for name in names]
    suffixes = list(AppConfig.model_validate({"model": "x", "further_models": further}).by_suffix())
    assert len(set(suffixes)) == len(names) + 1
    assert suffixes[:4] == ["", "-a", "-A", "-a%2Fb"]
    assert all(re.fullmatch(r"-[\w.~%+-]{1,120}", suffix, re.ASCII) for suffix in suffixes[1:])


def test_every_rank_reserves_its_cpus() -> None:
    one, two = (AppConfig.model_validate({"generate": {"tensor_parallel_size": n, "num_cpus": 1.5}}) for n in (1, 2))
    assert two.num_reserved_cpus - one.num_reserved_cpus == 1.5
