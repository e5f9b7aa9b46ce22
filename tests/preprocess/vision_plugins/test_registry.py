"""Plug-ins are found by name, by the model's name and in a folder; what is no plug-in is refused by name."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest

from raylens.preprocess.vision_plugins import registry
from raylens.preprocess.vision_plugins.interface import PluginParams, VisionPluginError, check_plugin
from raylens.preprocess.vision_plugins.registry import VisionPluginChoice, find_plugin, installed_plugins
from tests.preprocess.vision_plugins import plug_in

PARAMS: PluginParams = {
    "vision_device": "cpu",
    "vision_bits": 16,
    "projector_device": "cpu",
    "projector_bits": 32,
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    plug_in.unpack(tmp_path_factory.mktemp("package"), target)
    return target


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package is in this process only. Whatever another one installs meanwhile is not looked at."""
    monkeypatch.syspath_prepend(package)
    values = {
        "raylens_test_blocks",
        "raylens.preprocess.vision_plugins.llava",
        "raylens.preprocess.vision_plugins.minigpt4",
    }
    points = {point.name: point for point in entry_points(group=registry.ENTRY_POINTS) if point.value in values}
    monkeypatch.setattr(registry, "entry_points", lambda group: list(points.values()))
    return package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "blocks.py").write_text(plug_in.MODULE.replace(plug_in.NAME, "from-a-folder"))
    return tmp_path


@pytest.mark.usefixtures("installed")
def test_an_installed_one_is_found_by_its_name_and_gets_the_settings() -> None:
    assert plug_in.NAME in installed_plugins()
    plugin: Any = find_plugin(VisionPluginChoice(plug_in.NAME, None, PARAMS), "model")
    assert (plugin.name(), plugin.num_image_embeds()) == (plug_in.NAME, plug_in.NUM_EMBEDS)
    assert (plugin.device, plugin.bits) == ("cpu", 16)


def test_names_are_listed_without_importing_anything(package: Path) -> None:
    code = "from raylens.preprocess.vision_plugins.registry import *; print(*installed_plugins()); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{package}:."}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    names, modules = done.stdout.splitlines()
    assert plug_in.NAME in names.split()
    assert not {"raylens_test_blocks", "torch", "PIL"} & set(modules.split())


@pytest.mark.usefixtures("installed")
def test_no_module_is_imported_but_that_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("another", "no_such_module", registry.ENTRY_POINTS),
        EntryPoint(plug_in.NAME, "raylens_test_blocks", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert find_plugin(VisionPluginChoice(plug_in.NAME, None, PARAMS), "model").name() == plug_in.NAME
    with pytest.raises(VisionPluginError, match="the module no_such_module of vision plug-ins cannot be imported"):
        find_plugin(VisionPluginChoice("another", None, PARAMS), "model")


@pytest.mark.usefixtures("installed")
def test_one_is_found_by_the_models_name() -> None:
    for model in ("/models/llama-blocks-7b", "/models/llama-blocks-7b/", "owner/llama-blocks-7b"):
        assert find_plugin(VisionPluginChoice(None, None, PARAMS), model).name() == plug_in.NAME
    with pytest.raises(VisionPluginError, match="no vision plug-in for the model llama-7b; installed are: .*blocks"):
        find_plugin(VisionPluginChoice(None, None, PARAMS), "/blocks/llama-7b")


def test_one_of_a_folder_is_found_only_if_the_folder_is_named(folder: Path) -> None:
    choice = VisionPluginChoice("from-a-folder", str(folder), PARAMS)
    assert find_plugin(choice, "model").name() == "from-a-folder"
    with pytest.raises(VisionPluginError, match="no vision plug-in named 'from-a-folder'"):
        find_plugin(VisionPluginChoice("from-a-folder", None, PARAMS), "model")
    with pytest.raises(VisionPluginError, match=f"named 'other'.*, nor in the folder {folder}"):
        find_plugin(VisionPluginChoice("other", str(folder), PARAMS), "model")


def test_a_module_that_cannot_be_imported_is_named(folder: Path) -> None:
    (folder / "a_broken_one.py").write_text("import no_such_module")
    with pytest.raises(VisionPluginError, match=r"a_broken_one.py cannot be imported: ModuleNotFoundError"):
        find_plugin(VisionPluginChoice("from-a-folder", str(folder), PARAMS), "model")


def test_a_module_that_fails_is_named(folder: Path) -> None:
    (folder / "a_failing_one.py").write_text("def get_pipeline(name, params):\n    return params['no_such']")
    with pytest.raises(VisionPluginError, match=r"a_failing_one.py failed to make a vision plug-in: KeyError"):
        find_plugin(VisionPluginChoice("from-a-folder", str(folder), PARAMS), "model")


class Complete:
    """All that is asked for; tests change one thing."""

    def name(self) -> Any:
        return "complete"

    def image_start(self) -> Any:
        return ""

    def image_end(self) -> Any:
        return ""

    def placeholder_token_id(self) -> Any:
        return 0

    def num_image_embeds(self) -> Any:
        return 1

    def embed_images(self, images: Any) -> Any:
        raise NotImplementedError


def test_a_complete_one_is_taken() -> None:
    assert check_plugin(Complete(), "here").name() == "complete"


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("name", 3, "name of the vision plug-in of here must return a text, got 3"),
        ("image_end", None, "image_end of the vision plug-in of here must return a text, got None"),
        ("num_image_embeds", 0, "num_image_embeds .*'complete' must return a whole number of at least 1, got 0"),
        ("num_image_embeds", 2.5, "num_image_embeds .* got 2.5"),
        ("placeholder_token_id", -1, "placeholder_token_id .* of at least 0, got -1"),
        ("placeholder_token_id", True, "placeholder_token_id .* got True"),
    ],
)
def test_one_whose_methods_return_something_else_is_refused(method: str, value: Any, message: str) -> None:
    plugin = Complete()
    setattr(plugin, method, lambda: value)
    with pytest.raises(VisionPluginError, match=message):
        check_plugin(plugin, "here")


def test_one_that_lacks_methods_is_refused() -> None:
    with pytest.raises(VisionPluginError, match="plug-in of here has no method name, .*embed_images"):
        check_plugin(object(), "here")
