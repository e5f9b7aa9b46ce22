"""Reads a server's settings: a Serve config file, overridden by the command line and checked before anything starts."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig, ModelConfig
from raylens.deployments.endpoint.api_keys import ApiKeysError, read_keys
from raylens.modeling.families import FAMILIES, SERVED_FAMILIES
from raylens.preprocess.vision_plugins.registry import installed_plugins

ModelT = TypeVar("ModelT", bound=ModelConfig)

_HUB_NAME = re.compile(r"[A-Za-z0-9](?!.*(--|\.\.))[A-Za-z0-9._-]{0,94}")


class ConfigError(ValueError):
    """A setting or argument that cannot work. The message names it."""


def load_config(path: Path | None, flags: Mapping[str, Any]) -> AppConfig:
    """Returns the settings of a Serve config file (`args` of its only application), overridden by `flags`. Flags have
    the names of settings; a stage's settings begin with the stage's name, such as `generate.tensor_parallel_size`.

    Raises ConfigError, which names the file and the field."""
    settings, lines = ({}, _Lines(None)) if path is None else _read_settings(path)
    for name, value in flags.items():
        *sections, field = name.split(".")
        section = settings
        for part in sections:
            section = section.setdefault(part, {})
        section[field] = value
    settings.setdefault("model", str(BUNDLED_MODEL))
    try:
        config = AppConfig.model_validate(settings)
    except ValidationError as error:
        problems = [_problem(one["loc"], one["msg"], flags, lines) for one in error.errors()]
        raise ConfigError(f"{path or 'settings'}: {'; '.join(problems)}") from error
    config = _checked(_with_local_root(_with_keys(config)))
    if not config.further_models:
        return config
    further = []
    for number, model in enumerate(config.further_models):
        try:
            further.append(_checked(model))
        except ConfigError as error:
            if "further_models" in flags:
                raise
            place = _place(("further_models", number), lines)
            raise ConfigError(f"{path}: {place}.{str(error).removeprefix('--')}") from error
    config = config.model_copy(update={"further_models": tuple(further)})
    try:
        config.check_names()  # again: links to one folder resolve to the same name
    except ValueError as error:
        raise ConfigError(f"{path or 'settings'}: {error}") from error
    return config


def _checked(config: ModelT) -> ModelT:
    """Refuses a model that cannot be served. Makes its paths absolute, because replicas start in another folder."""
    config = _with_adapters(_with_plugins(config))
    folder = Path(config.model).expanduser()
    if not folder.exists():
        _check_hub_id(config)
        return config
    _check_family(f"--model {folder}", folder / "config.json", has_plugin=config.vision_plugin.name is not None)
    return config.model_copy(update={"model": str(folder.resolve())})


class _Lines:
    """Maps each field of a YAML document to its line in the file."""

    def __init__(self, root: yaml.Node | None) -> None:
        self._root = root

    def of(self, location: Sequence[int | str]) -> int | None:
        """Returns the line of the field at `location`, counted from 1. For an absent field, returns the line of the
        last field on the way to it."""
        node, line = self._root, None
        for part in location:
            if isinstance(node, yaml.MappingNode):
                found = {key.value: (key, value) for key, value in node.value}
                if part not in found:
                    break
                key, node = found[part]
                line = key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
        return line


def _problem(location: Sequence[int | str], message: str, flags: Mapping[str, Any], lines: _Lines) -> str:
    field = ".".join(map(str, location))
    if field in flags:
        return f"--{field.rpartition('.')[2].replace('_', '-')}: {message}"
    return ": ".join(filter(None, [_place(location, lines), message]))


def _place(location: Sequence[int | str], lines: _Lines) -> str:
    """Returns the name of the setting at `location`, empty for all settings together, and its line in the file."""
    field, line = ".".join(map(str, location)), lines.of(("applications", 0, "args", *location))
    return field if line is None else f"line {line}: {field}".removesuffix(": ")


def _read_settings(path: Path) -> tuple[dict[str, Any], _Lines]:
    try:
        text = path.read_text()
        document = yaml.safe_load(text)
        (application,) = document["applications"]
        return dict(application.get("args") or {}), _Lines(yaml.compose(text, yaml.SafeLoader))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{path}{where}: {error.problem}") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a Serve config file with one application") from error


def _with_keys(config: AppConfig) -> AppConfig:
    """Checks the key file, and makes its path absolute, because replicas start in another folder."""
    if config.auth.keys_file is None:
        return config
    file = Path(config.auth.keys_file).expanduser().resolve()
    try:
        read_keys(file)
    except ApiKeysError as error:
        raise ConfigError(f"auth.keys_file: {error}") from error
    return config.model_copy(update={"auth": config.auth.model_copy(update={"keys_file": str(file)})})


def _with_local_root(config: AppConfig) -> AppConfig:
    """Makes the path of the media folder absolute."""
    if config.media.local_root is None:
        return config
    folder = _absolute_folder("media.local_root", config.media.local_root)
    return config.model_copy(update={"media": config.media.model_copy(update={"local_root": folder})})


def _with_adapters(config: ModelT) -> ModelT:
    """Makes the path of the adapters' folder absolute."""
    if config.generate.adapters_folder is None:
        return config
    folder = _absolute_folder("generate.adapters_folder", config.generate.adapters_folder)
    return config.model_copy(update={"generate": config.generate.model_copy(update={"adapters_folder": folder})})


def _absolute_folder(setting: str, path: str) -> str:
    """Returns the absolute path. Raises ConfigError unless it is a folder."""
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"{setting}: {folder} is no folder")
    return str(folder)


def _check_hub_id(config: ModelConfig) -> None:
    """Refuses an invalid hub name, a model that the hub does not have, and a model that this server cannot serve."""
    model = config.model
    owner, slash, name = model.partition("/")
    if not slash or not _HUB_NAME.fullmatch(owner) or not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"--model {model}: no such folder, and not a hub id (owner/name)")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        file = hf_hub_download(model, "config.json", revision=config.revision)
    except RepositoryNotFoundError as error:
        raise ConfigError(f"--model {model}: no such model on the hub, or one that asks for a token") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--model {model}: cannot be fetched from the hub: {reason}") from error
    _check_family(f"--model {model}", Path(file), has_plugin=config.vision_plugin.name is not None)


def _with_plugins(config: ModelT) -> ModelT:
    """Makes the path of the plug-ins' folder absolute, and refuses a plug-in that is not installed. Only a replica runs
    the folder's modules and can check for a plug-in there."""
    choice = config.vision_plugin
    if choice.name is None:
        return config
    if choice.folder is None:
        known = installed_plugins()
        if choice.name not in ("auto", *known):
            raise ConfigError(f"--vision-plugin {choice.name}: no such plug-in is installed, only {known}")
        return config
    folder = _absolute_folder("vision_plugin.folder", choice.folder)
    return config.model_copy(update={"vision_plugin": choice.model_copy(update={"folder": folder})})


def _check_family(argument: str, file: Path, *, has_plugin: bool) -> None:
    """Refuses a model whose `model_type` this server cannot serve. With a plug-in, any type without a vision half may
    pass; the engine refuses the types that it cannot run."""
    try:
        model_type = json.loads(file.read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{argument}: no readable config.json with a model_type in it") from error
    if has_plugin:
        if model_type in FAMILIES and FAMILIES[model_type].encoder is not None:
            raise ConfigError(f"{argument}: a {model_type!r} has a vision half and takes no vision plug-in")
        return
    if model_type not in SERVED_FAMILIES:
        known = FAMILIES.get(model_type)
        reason = "" if known is None else f": {known.why_unserved}"
        raise ConfigError(
            f"{argument}: model_type {model_type!r} is not supported{reason}, only {sorted(SERVED_FAMILIES)}"
        )
