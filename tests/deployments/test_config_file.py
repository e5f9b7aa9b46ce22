"""Settings from a file and from the command line: which goes before which, and what is refused with which words."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from raylens.deployments.launch.config_file import ConfigError, load_config


def write(folder: Path, text: str) -> Path:
    path = folder / "serve.yaml"
    path.write_text(text)
    return path


def test_the_command_line_goes_before_the_file(tmp_path: Path, shapes: str) -> None:
    path = write(
        tmp_path, "applications: [{args: {model: other/model, generate: {engine: {block_size: 8}, num_cpus: 2}}}]"
    )
    config = load_config(path, {"model": shapes, "generate.num_cpus": 3, "dtype": "bfloat16"})
    assert (config.model, config.model_name, config.dtype) == (shapes, "shapes", "bfloat16")
    assert (config.generate.engine.block_size, config.generate.num_cpus) == (8, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "applications:\n- args:\n    generate:\n      engine:\n        block_sise: 8\n",
            r"serve.yaml: line 5: generate\.engine\.block_sise: Unexpected",
        ),
        ("applications:\n- args:\n    dtype: float7\n", r"line 3: dtype: Input should be 'auto'"),
        (
            "applications: [{args: {media: {limits: {max_items: [1]}}}}]",
            r"line 1: media\.limits\.max_items: Input should be",
        ),
        (
            "applications:\n- args:\n    chat:\n      tool_call_parser: x",
            r"line 4: chat\.tool_call_parser: .*must be one of hermes, .*, got 'x'",
        ),
        ("applications: [{args: {chat: {template: /no/such}}}]", r"chat\.template: /no/such: No such file"),
        ("applications: []", "not a Serve config file"),
        ("just text", "not a Serve config file"),
        ("a: [1,\n  b: }", r"serve\.yaml, line 2, column 6: "),
        ("a: 1\n\tb: 2", r"serve\.yaml, line 2, column 1: found character '\\t'"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), {})


def test_a_further_model_that_cannot_be_served_is_named_with_its_line(tmp_path: Path, shapes: str) -> None:
    head = f"applications:\n- args:\n    model: {shapes}\n    further_models:\n    - model: "
    for rest, message in (
        ("/no/such", r"serve\.yaml: line 5: further_models\.0\.model /no/such: no such folder"),
        (
            f"{shapes}\n      served_model_name: b\n    - model: /x/y",
            r"line 7: further_models\.1\.model /x/y: no such folder",
        ),
        (f"{shapes}\n      dtype: float7", r"line 6: further_models\.0\.dtype: Input should be 'auto'"),
        (f"{shapes}\n      media: {{}}", r"line 6: further_models\.0\.media: Extra inputs"),
        (f"{tmp_path}", r"line 5: further_models\.0\.model .*: no readable config\.json"),
        (shapes, r"serve\.yaml: line 2: Value error, two models have the name 'shapes'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(write(tmp_path, f"{head}{rest}\n"), {})


def test_two_links_to_one_folder_are_one_name(tmp_path: Path, shapes: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(shapes)
    with pytest.raises(ConfigError, match="settings: two models have the name 'shapes'"):
        load_config(None, {"model": str(tmp_path / "a"), "further_models": [{"model": str(tmp_path / "b")}]})


def test_the_paths_of_all_models_become_absolute(tmp_path: Path, shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(shapes).parent)
    text = "applications: [{args: {model: shapes, further_models: [{model: shapes, served_model_name: b}]}}]"
    config = load_config(write(tmp_path, text), {})
    assert [(model.model, model.model_name) for model in config.models] == [(shapes, "shapes"), (shapes, "b")]


def test_the_answers_of_a_reranker_may_be_no_and_yes(tmp_path: Path, shapes: str) -> None:
    text = f"applications: [{{args: {{model: {shapes}, pooling: {{score_tokens: [no, yes]}}}}}}]"
    assert load_config(write(tmp_path, text), {}).pooling.score_tokens == ("no", "yes")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dtype": "float7"}, "--set dtype: Input should be 'auto'"),
        ({"generate.tensor_parallel_size": 0}, "--set generate.tensor_parallel_size: Input should be greater"),
        ({"max_model_len": -1}, "--set max_model_len: Input should be greater"),
    ],
)
def test_a_bad_flag_is_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, flags)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml", {})


@pytest.mark.parametrize(
    "model",
    ["/no/such/folder", "./nothing", "one-word", "a/b/c", "own er/name", "owner/na--me", "owner/.name", "/x", "x/"],
)
def test_a_model_that_cannot_be_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=f"--model {model}: no such folder, and not a hub id"):
        load_config(None, {"model": model})


def test_a_folder_without_a_supported_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        load_config(None, {"model": str(tmp_path)})
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"'bert' is not supported; docs/models\.md lists"):
        load_config(None, {"model": str(tmp_path)})
    (tmp_path / "config.json").write_text('{"model_type": "internlm2"}')
    with pytest.raises(ConfigError, match=r"'internlm2' is not supported: it is the text half"):
        load_config(None, {"model": str(tmp_path)})
    (tmp_path / "config.json").write_text('{"model_type": "pi0"}')
    with pytest.raises(ConfigError, match=r"'pi0' is not supported: it returns the actions of a robot and no text"):
        load_config(None, {"model": str(tmp_path)})


def test_a_model_on_the_hub_is_looked_at_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = {"model_type": "llava"}

    def download(model: str, file: str, *, revision: str | None) -> str:
        assert (model, file, revision) == ("owner/name", "config.json", None)
        if not hub:
            raise LocalEntryNotFoundError("no network\nand nothing in the cache")
        path = tmp_path / "config.json"
        path.write_text(json.dumps(hub))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("raylens.deployments.launch.hub._why_away", lambda model, revision: None)
    assert load_config(None, {"model": "owner/name"}).model == "owner/name"
    hub["model_type"] = "bert"
    with pytest.raises(ConfigError, match="--model owner/name: model_type 'bert' is not supported"):
        load_config(None, {"model": "owner/name"})
    hub.clear()
    with pytest.raises(ConfigError, match="--model owner/name: cannot be fetched from the hub: no network$"):
        load_config(None, {"model": "owner/name"})


def test_the_folder_of_adapters_is_absolute_and_has_to_exist(
    tmp_path: Path, shapes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapters").mkdir()
    monkeypatch.chdir(tmp_path)
    flags = {"model": shapes, "generate.engine.max_loras": 1, "generate.adapters_folder": "adapters"}
    assert load_config(None, flags).generate.adapters_folder == str(tmp_path / "adapters")
    with pytest.raises(ConfigError, match=r"generate\.adapters_folder: .*/absent is no folder"):
        load_config(None, {**flags, "generate.adapters_folder": "absent"})
