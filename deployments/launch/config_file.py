"""Reads a server's settings: a Serve config file, overridden by the command line and checked before anything starts."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig, ModelConfig, VisionPluginConfig
from raylens.deployments.endpoint.api_keys import ApiKeysError, read_keys
from raylens.deployments.launch.hub import HubError, fetch_config
from raylens.modeling.checkpoint_files import HOW_TO_CONVERT, text_section, why_broken
from raylens.modeling.families import FAMILIES, SERVED_FAMILIES, is_found
from raylens.preprocess.vision_plugins.registry import installed_plugins

ModelT = TypeVar("ModelT", bound=ModelConfig)

_HUB_NAME = re.compile(r"[A-Za-z0-9](?!.*(--|\.\.))[A-Za-z0-9._-]{0,94}")


_MODELS = "docs/models.md lists the models"


class ConfigError(ValueError):
    """A setting or argument that cannot work. The message names it."""


def load_config(
    path: Path | None, flags: Mapping[str, Any], *, flag_of: Callable[[str], str] = "--set {}".format
) -> AppConfig:
    """Returns the settings of a Serve config file (`args` of its only application), overridden by `flags`, by dotted
    names such as `generate.tensor_parallel_size`. `flag_of`: returns what the command line calls one of them. Raises
    ConfigError, which names the file and the field."""
    settings, lines = ({}, _Lines(None)) if path is None else _read_settings(path)
    for name, value in flags.items():
        *sections, field = name.split(".")
        section = settings
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{flag_of(name)}: {part} is not a section of settings")
        section[field] = value
    settings.setdefault("model", str(BUNDLED_MODEL))
    try:
        config = AppConfig.model_validate(settings)
    except ValidationError as error:
        spelt = {name: flag_of(name) for name in flags}
        problems = [_problem(one["loc"], one["msg"], spelt, lines) for one in error.errors()]
        raise ConfigError(f"{path or 'settings'}: {'; '.join(problems)}") from error
    config = _checked(_with_folder(_with_keys(config), "media", "local_root"))
    if not config.further_models:
        return config  # without a field that the file does not set
    further = []
    for number, model in enumerate(config.further_models):
        try:
            further.append(_checked(model))
        except ConfigError as error:
            if "further_models" in flags:
                raise
            place = _place(("further_models", number), lines)
            raise ConfigError(f"{path}: {place}.{str(error).removeprefix('--')}") from error
    try:  # again: links to one folder resolve to the same name
        return config.model_copy(update={"further_models": tuple(further)}).with_own_names()
    except ValueError as error:
        raise ConfigError(f"{path or 'settings'}: {error}") from error


def _checked(config: ModelT) -> ModelT:
    """Refuses a model that cannot be served. Makes its paths absolute, because replicas start in another folder."""
    config = _with_template(_with_folder(config, "generate", "adapters_folder"))
    if config.vision_plugin.name is not None:
        _check_plugin(config.vision_plugin)
        config = _with_folder(config, "vision_plugin", "folder")
    folder = Path(config.model).expanduser()
    if not folder.exists():
        _check_hub_id(config)
        return config
    _check_model(config, f"--model {folder}", folder / "config.json")
    if (reason := why_broken(folder)) is not None:
        remedy = "" if HOW_TO_CONVERT in reason else "; copy or download the checkpoint again"
        raise ConfigError(f"--model {folder}: {reason}{remedy}")
    return config.model_copy(update={"model": str(folder.resolve())})


def _with_template(config: ModelT) -> ModelT:
    if config.chat.template is None:
        return config
    file = Path(config.chat.template).expanduser().resolve()
    try:
        file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"chat.template: {config.chat.template}: {reason}") from error
    return config.model_copy(update={"chat": config.chat.model_copy(update={"template": str(file)})})


class _Lines:
    """Maps each field of a YAML document to its line in the file."""

    def __init__(self, root: yaml.Node | None) -> None:
        self._root = root

    def of(self, location: Sequence[int | str]) -> int | None:
        """Returns the line of the field at `location`, from 1; for an absent field, of the last field on its path."""
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


def _problem(location: Sequence[int | str], message: str, flags: Mapping[str, str], lines: _Lines) -> str:
    field = ".".join(map(str, location))
    if field in flags:
        return f"{flags[field]}: {message}"
    return ": ".join(filter(None, [_place(location, lines), message]))


def _place(location: Sequence[int | str], lines: _Lines) -> str:
    """Returns the setting's name, empty for all settings together, and its line in the file."""
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
    if config.auth.keys_file is None:
        return config
    file = Path(config.auth.keys_file).expanduser().resolve()
    try:
        read_keys(file)
    except ApiKeysError as error:
        raise ConfigError(f"auth.keys_file: {error}") from error
    return config.model_copy(update={"auth": config.auth.model_copy(update={"keys_file": str(file)})})


def _with_folder(config: ModelT, section: str, field: str) -> ModelT:
    """Makes the path of a folder absolute. Raises ConfigError if there is no such folder."""
    settings = getattr(config, section)
    if (path := getattr(settings, field)) is None:
        return config
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"{section}.{field}: {folder} is no folder")
    return config.model_copy(update={section: settings.model_copy(update={field: str(folder)})})


def _check_hub_id(config: ModelConfig) -> None:
    model = config.model
    owner, slash, name = model.partition("/")
    if not slash or not _HUB_NAME.fullmatch(owner) or not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"--model {model}: no such folder, and not a hub id (owner/name)")
    try:
        file = fetch_config(model, config.revision)
    except HubError as error:
        raise ConfigError(f"--model {model}: {error}") from error
    _check_model(config, f"--model {model}", file)


def _check_plugin(choice: VisionPluginConfig) -> None:
    """Refuses a plug-in that is not installed. Only a replica runs a folder's modules, so it checks plug-ins there."""
    if choice.folder is None and choice.name not in ("auto", *(known := installed_plugins())):
        raise ConfigError(f"--vision-plugin {choice.name}: no such plug-in is installed, only {known}")


def _check_model(config: ModelConfig, argument: str, file: Path) -> None:
    """Refuses a model that this server cannot serve, by its config.json."""
    try:
        settings = json.loads(file.read_text())
        model_type = settings["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "name the folder of a model in Hugging Face format"
        raise ConfigError(f"{argument}: no readable config.json with a model_type in it: {remedy}") from error
    _check_family(argument, model_type, has_plugin=config.vision_plugin.name is not None)
    _check_ranks(config, settings)


def _check_ranks(config: ModelConfig, settings: Mapping[str, Any]) -> None:
    """Refuses ranks that cannot divide the heads of attention. config.json may leave out heads that transformers knows
    for the model type; the ranks themselves check those."""
    own = settings.get("thinker_config", settings)
    text = text_section(own) or own
    heads = text.get("num_attention_heads")
    kv_heads = text.get("num_key_value_heads") or heads
    ranks = config.generate.tensor_parallel_size
    if not (isinstance(heads, int) and isinstance(kv_heads, int)):
        return
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if ranks not in possible:
        raise ConfigError(
            f"generate.tensor_parallel_size: {ranks} ranks cannot divide the {heads} attention heads and {kv_heads}"
            f" key/value heads of {config.model_name}: take one of {', '.join(map(str, possible))}"
        )


def _check_family(argument: str, model_type: str, *, has_plugin: bool) -> None:
    """Refuses a `model_type` that this server cannot serve. With a plug-in, the engine decides on text models."""
    if has_plugin:
        has_encoder = model_type in FAMILIES and FAMILIES[model_type].encoder is not None
        if has_encoder or is_found(model_type):
            raise ConfigError(f"{argument}: a {model_type!r} has a vision half and takes no vision plug-in")
        return
    if model_type not in SERVED_FAMILIES and not is_found(model_type):
        reason = f": {FAMILIES[model_type].why_unserved}" if model_type in FAMILIES else ""
        raise ConfigError(f"{argument}: model_type {model_type!r} is not supported{reason}; {_MODELS}")
