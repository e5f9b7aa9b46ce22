"""Finds plug-ins: in installed packages, by the entry points `raylens.vision_plugins`, and in a folder of modules."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from raylens.preprocess.vision_plugins.interface import PluginParams, VisionPlugin, VisionPluginError, check_plugin

ENTRY_POINTS = "raylens.vision_plugins"
"""The group of entry points. An entry point has the name of a plug-in, and its value is the module that makes it."""


@dataclass(frozen=True, slots=True)
class VisionPluginChoice:
    """The plug-in that adds a vision encoder to a text model.

    `name`: None: the one that a module finds for the model's name. `folder`: a folder of further modules, whose code is
    run; None: only installed packages are looked through."""

    name: str | None
    folder: str | None
    params: PluginParams


def installed_plugins() -> list[str]:
    """Returns the names of the plug-ins of installed packages, sorted. Imports none of them."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINTS)})


def find_plugin(choice: VisionPluginChoice, model: str) -> VisionPlugin:
    """Returns the chosen plug-in for a text model, a folder or a hub id. The model's name is the last part of that.

    Raises VisionPluginError if there is none, if a module cannot be imported, and if a plug-in breaks the interface."""
    model_name = model.rstrip("/").rsplit("/", 1)[-1]
    for source, module in _modules(choice):
        try:
            if choice.name is None:
                plugin = module.get_pipeline_from_model_name(model_name, choice.params)
            else:
                plugin = module.get_pipeline(choice.name, choice.params)
        except Exception as error:
            raise VisionPluginError(f"{source} failed to make a vision plug-in: {error!r}") from error
        if plugin is not None:
            return check_plugin(plugin, source)
    wanted = f"for the model {model_name}" if choice.name is None else f"named {choice.name!r}"
    known = ", ".join(installed_plugins()) or "none"
    where = "" if choice.folder is None else f", nor in the folder {choice.folder}"
    raise VisionPluginError(f"there is no vision plug-in {wanted}; installed are: {known}{where}")


def _modules(choice: VisionPluginChoice) -> Iterator[tuple[str, Any]]:
    """Yields modules that may have the plug-in, with a name for errors. Of the installed ones it imports only those
    that have a plug-in of the name."""
    imported: set[str] = set()
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        if choice.name in (None, point.name) and point.value not in imported:
            imported.add(point.value)
            yield point.value, _loaded(point)
    if choice.folder is not None:
        for file in sorted(Path(choice.folder).glob("*.py")):
            yield str(file), _run(file)


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise VisionPluginError(f"the module {point.value} of vision plug-ins cannot be imported: {error!r}") from error


def _run(file: Path) -> Any:
    """Imports a file of the folder as a module. The module gets a name of its own, so that it hides no other."""
    name = f"raylens_vision_plugin_{file.stem}"
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise VisionPluginError(f"{file} cannot be imported: {error!r}") from error
    return module
