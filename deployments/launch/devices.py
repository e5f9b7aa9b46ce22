"""Chooses the stages' devices for `raylens serve`: this machine's GPUs, unless settings or flags say otherwise."""

import importlib.machinery
import json
import math
import os
import runpy
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import ValidationError

from raylens.deployments.config import AppConfig, ModelConfig
from raylens.deployments.launch.config_file import ConfigError
from raylens.deployments.operator import figures
from raylens.modeling.checkpoint_files import num_weight_bytes

Device = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[Device, ...] = get_args(Device)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_ANSWER_SECONDS = 10.0  # a driver without a persistent process takes seconds for several GPUs
_ENCODE_BYTES = 4 * 2**30
"""Memory of Encode beside its activations: the vision half's weights, a CUDA context, inputs and embeddings."""
_STEP_PERCENT = 5
_MOST_SHARE = 0.2
"""Encode's largest share of a GPU. On smaller GPUs it runs inside Generate, with one CUDA context for both."""
_CPU = "the CPU"


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine."""

    uuid: str
    name: str
    memory_bytes: int


class NoGpuError(Exception):
    """No GPU can be used. The message is the reason."""


def choose_devices(config: AppConfig, *, device: Device = "auto", num_gpus: int | None = None) -> tuple[AppConfig, str]:
    """Returns the settings with the GPUs of each stage, and a line that tells them. `num_gpus`: the most GPUs to use;
    hides the others from this process and its children. Settings of `num_gpus` stay, but not against `device`. Raises
    ConfigError if the machine lacks what the arguments ask for."""
    if device == "cpu":
        if num_gpus is not None:
            raise ConfigError(f"--device cpu takes no GPU, but --num-gpus is {num_gpus}")
        config = _with_shares(config, [(one.encode.placement, 0.0, 0.0) for one in config.models])
        return config, _told(config)
    given = [*_given(config)]
    is_set = any(given) if device == "cuda" else bool(given)
    if is_set and num_gpus is None:
        return config, f"{_told(config)}, as set"
    asked = "--device cuda" if device == "cuda" else None if num_gpus is None else f"--num-gpus {num_gpus}"
    try:
        gpus = _first(find_gpus(), num_gpus)
        if is_set:
            return config, f"{_told(config)}, as set"
        return (on_gpus := placed(config, gpus)), f"{_told(on_gpus)}, of {_named(gpus)}; --device cpu takes none"
    except NoGpuError as error:
        reason = str(error)
    except ValidationError as error:
        (first, *_) = error.errors()
        reason = ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])
    except _TooLargeError as error:
        reason = str(error)
    if asked is not None:
        raise ConfigError(f"{asked}: {reason}; --device cpu takes no GPU")
    return config, f"{_told(config)}: {reason}"


def find_gpus() -> list[Gpu]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order. Raises NoGpuError."""
    visible = os.environ.get(_VISIBLE)
    if visible is not None and visible.strip() in ("", "-1"):
        raise NoGpuError(f"no GPU: {_VISIBLE} is {visible!r}")
    found = _ask_nvidia_smi()
    if not found:
        raise NoGpuError("no GPU: nvidia-smi shows none")
    if not _has_cuda_build():
        raise NoGpuError(f"PyTorch is a build without CUDA, beside {_named([*found.values()])}")
    gpus = [*found.values()] if visible is None else [*_visible(found, visible)]
    if not gpus:
        raise NoGpuError(f"no GPU: {_VISIBLE} is {visible!r}, which names none of nvidia-smi's")
    return gpus


def placed(config: AppConfig, gpus: Sequence[Gpu]) -> AppConfig:
    """Returns the settings with the GPUs divided among the stages. Each process gets a GPU of its own if there are
    enough. Otherwise an Encode shares a GPU with a Generate. Raises ConfigError with fewer GPUs than ranks."""
    processes = sum(
        one.generate.max_replicas * one.generate.tensor_parallel_size
        + (0 if one.encode.placement == "inline" else one.encode.max_replicas)
        for one in config.models
    )
    ranks = sum(one.generate.min_replicas * one.generate.tensor_parallel_size for one in config.models)
    per_gpu = math.ceil(ranks / len(gpus))
    if per_gpu > 1 and any(one.generate.tensor_parallel_size > 1 for one in config.models):
        few = f"{ranks} ranks take {ranks} GPUs, and there are {len(gpus)}"
        raise ConfigError(f"generate.tensor_parallel_size: {few}: lower it, or serve with --device cpu")
    memory = min(gpu.memory_bytes for gpu in gpus)
    for one in config.models:
        _check_weights(one, memory // per_gpu)
    has_own = len(gpus) >= processes
    return _with_shares(config, [_shares(one, memory, per_gpu, has_own=has_own) for one in config.models])


def _shares(config: ModelConfig, memory: int, per_gpu: int, *, has_own: bool) -> tuple[str, float, float]:
    """Returns the placement of Encode, and the GPUs of Encode and of a rank of Generate."""
    placement, whole = config.encode.placement, 100 // per_gpu
    if has_own:
        return placement, 0.0 if placement == "inline" else 1.0, 1.0
    needed = 100 * (config.encode.activation_bytes + _ENCODE_BYTES) / memory
    encode = _STEP_PERCENT * math.ceil(needed / _STEP_PERCENT)
    if "placement" not in config.encode.model_fields_set and encode > _MOST_SHARE * whole:
        placement = "inline"
    if placement == "inline":
        return placement, 0.0, whole / 100
    encode = min(encode, whole // 2)
    return placement, encode / 100, (whole - encode) / 100


class _TooLargeError(Exception):
    """A model's weights exceed the memory of its GPUs."""


def _check_weights(config: ModelConfig, memory: int) -> None:
    """Raises _TooLargeError if the weights of a local checkpoint exceed the memory of the model's GPUs."""
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        return
    size, room = num_weight_bytes(folder), memory * config.generate.tensor_parallel_size
    is_halved = config.dtype != "float32" and _stored_dtype(folder) == "float32"
    if (size := size // 2 if is_halved else size) > room:
        raise _TooLargeError(
            f"the weights of {config.model_name} take {figures.size(size)} of GPU memory, and there are"
            f" {figures.size(room)}"
        )


def _stored_dtype(folder: Path) -> str | None:
    settings = json.loads((folder / "config.json").read_text())
    found: str | None = settings.get("dtype", settings.get("torch_dtype"))
    return found


def _with_shares(config: AppConfig, shares: Sequence[tuple[str, float, float]]) -> AppConfig:
    """Returns the settings with the placement, `encode.num_gpus` and `generate.num_gpus` of each model."""
    settings = config.model_dump(exclude_unset=True)
    for own, (placement, encode, generate) in zip([settings, *settings.get("further_models", [])], shares, strict=True):
        own["encode"] = own.get("encode", {}) | {"placement": placement, "num_gpus": encode}
        own["generate"] = own.get("generate", {}) | {"num_gpus": generate}
    return AppConfig.model_validate(settings)


def _given(config: AppConfig) -> Iterator[float]:
    """Yields each `num_gpus` that a file or a flag sets."""
    for one in config.models:
        for stage in (one.encode, one.generate):
            if "num_gpus" in stage.model_fields_set:
                yield stage.num_gpus


def _first(gpus: Sequence[Gpu], number: int | None) -> Sequence[Gpu]:
    """Returns the first GPUs and hides the others, also from Ray."""
    if number is None:
        return gpus
    if number > len(gpus):
        raise ConfigError(f"--num-gpus {number}: this machine has {_named(gpus)}")
    os.environ[_VISIBLE] = ",".join(gpu.uuid for gpu in gpus[:number])
    return gpus[:number]


def _told(config: AppConfig) -> str:
    """Returns the devices of each model's stages, in words."""
    each = [_told_of(one) for one in config.models]
    if len(set(each)) == 1:
        return each[0] + (f" for each of {len(each)} models" if len(each) > 1 else "")
    return "; ".join(f"{one.model_name}: {line}" for one, line in zip(config.models, each, strict=True))


def _told_of(config: ModelConfig) -> str:
    ranks = config.generate.tensor_parallel_size
    encode, generate = (f"{one:g} GPU" if one else _CPU for one in (config.encode.num_gpus, config.generate.num_gpus))
    generate += f" for each of {ranks} ranks" if ranks > 1 else ""
    if config.encode.placement == "inline":
        return f"Encode inside Generate on {generate}"
    return (
        f"Encode and Generate on {_CPU}"
        if encode == generate == _CPU
        else f"Encode on {encode}, Generate on {generate}"
    )


def _named(gpus: Sequence[Gpu]) -> str:
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    return f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({smallest.name}, {figures.size(smallest.memory_bytes)})"


def _visible(found: dict[str, Gpu], visible: str) -> Iterator[Gpu]:
    """Yields the GPUs that the variable names by index or UUID, up to the first unknown one, as CUDA does."""
    for name in visible.split(","):
        key = name.strip()
        uuids = (gpu for gpu in found.values() if key.startswith("GPU-") and gpu.uuid.startswith(key))
        if (gpu := found.get(key) or next(uuids, None)) is None:
            return
        yield gpu


def _ask_nvidia_smi() -> dict[str, Gpu]:
    """Returns all GPUs by their index. Importing torch instead would take seconds and a CUDA context."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True).stdout
    except FileNotFoundError as error:
        raise NoGpuError("no GPU: there is no nvidia-smi") from error
    except subprocess.TimeoutExpired as error:
        raise NoGpuError(f"no GPU: nvidia-smi does not answer within {_ANSWER_SECONDS:g} s") from error
    except subprocess.CalledProcessError as error:
        reason = f"{error.stdout}{error.stderr}".strip().partition("\n")[0] or f"status {error.returncode}"
        raise NoGpuError(f"no GPU: nvidia-smi: {reason}") from error
    except OSError as error:
        raise NoGpuError(f"no GPU: nvidia-smi: {error.strerror}") from error
    found = {}
    for line in answer.splitlines():
        try:
            index, uuid, name, mebibytes = line.split(", ")
            found[index] = Gpu(uuid, name, int(mebibytes) * 2**20)
        except ValueError as error:
            raise NoGpuError(f"no GPU: nvidia-smi: {line}") from error
    return found


def _has_cuda_build() -> bool:
    """Returns whether the installed torch is built with CUDA, without importing it."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any(runpy.run_path(f"{folder}/version.py")["cuda"] is not None for folder in folders)
