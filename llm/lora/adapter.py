"""Reads a LoRA adapter in PEFT's format: a linear layer with an adapter computes W x + scale * B (A x)."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from raylens.llm.lora.request import CONFIG_FILE, WEIGHTS_FILE, LoraError

_MAX_CONFIG_BYTES = 2**20
# The parts that a key's path may have before `layers.`. Other paths belong to another part of the model.
_DECODER_PARTS = frozenset({"base_model", "model", "language_model", "text_model", "decoder", "llm"})
_KEY = re.compile(r"(?P<front>(?:\w+\.)*?)(?P<module>layers\.\d+\.[\w.]+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
# PEFT settings that change an adapter's computation, each with its neutral values besides null.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora"), (False,)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "target_parameters", "alora_invocation_tokens"), ([],)),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "velora_config", "use_bdlora"), ()),
    "trainable_token_indices": ([], {}),
    "bias": ("none",),
    # Other values, such as PiSSA, also change the base weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The sizes of a linear layer that an adapter may change."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """An adapter's addition to one linear layer: `b` @ (`a` @ x). `a` is (rank, in_features), `b` (out_features, rank)
    with the scale applied. Both are finite and in the model's dtype."""

    a: torch.Tensor
    b: torch.Tensor


def read_adapter(
    folder: str, layers: Mapping[str, LinearShape], *, max_rank: int, dtype: torch.dtype
) -> dict[str, LoraDelta]:
    """Returns an adapter's deltas in `dtype` by their layers' names in `layers`, which begin with `layers.`.

    Raises LoraError for an unreadable folder, and for an adapter that is not supported or does not fit the model."""
    deltas = {}
    with _opened(folder, layers, max_rank) as (file, pairs):
        for name, key_a, key_b, scale in pairs:
            a, b = file.get_tensor(key_a).float().to(dtype), (file.get_tensor(key_b).float() * scale).to(dtype)
            if not (a.isfinite().all() and b.isfinite().all()):
                raise LoraError(f"lora_A or lora_B of {name!r} holds numbers that are not finite in {dtype}")
            deltas[name] = LoraDelta(a, b)
    return deltas


def check_adapter(folder: str, layers: Mapping[str, LinearShape], *, max_rank: int) -> None:
    """Raises the LoraErrors of `read_adapter` that concern settings, names and shapes. Reads no weights."""
    with _opened(folder, layers, max_rank):
        pass


@contextmanager
def _named(file: str) -> Iterator[None]:
    """Makes errors name the file without its full path, because clients read them."""
    try:
        yield
    except LoraError as error:
        raise LoraError(f"{file}: {error}") from error
    except (SafetensorError, OSError) as error:
        reason = error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
        raise LoraError(f"{file} cannot be read: {reason}") from error


@contextmanager
def _opened(
    folder: str, layers: Mapping[str, LinearShape], max_rank: int
) -> Iterator[tuple[Any, list[tuple[str, str, str, float]]]]:
    """Yields the open file of weights, and for each layer its name, the keys of A and B, and the scale."""
    with _named(CONFIG_FILE):
        config = _read_config(Path(folder, CONFIG_FILE))
    path = Path(folder, WEIGHTS_FILE)
    if not path.is_file():
        pickled = path.with_suffix(".bin")
        reason = f", and {pickled.name} is a pickle, which is not read" if pickled.is_file() else ""
        raise LoraError(f"{path.name} does not exist{reason}: PEFT's save_pretrained writes it")
    with _named(WEIGHTS_FILE), safe_open(path, framework="pt") as file:
        pairs = []
        for name, keys in _pairs(file.keys(), layers).items():
            a, b = (tuple(file.get_slice(key).get_shape()) for key in keys)
            _check_shapes(name, a, b, layers[name], max_rank)
            pairs.append((name, *keys, config.scale(keys[0], rank=a[0])))
        yield file, pairs


@dataclass(frozen=True, slots=True)
class _Config:
    """`alphas`: by pattern, the alpha of modules whose names end with a match (PEFT's `alpha_pattern`)."""

    alpha: float
    alphas: Mapping[str, float]
    is_rank_stabilized: bool

    def scale(self, key: str, rank: int) -> float:
        """Returns the factor of the layer whose A is the tensor `key`."""
        module = key.removeprefix("base_model.model.").rpartition(".lora_A")[0]
        found = (alpha for pattern, alpha in self.alphas.items() if re.match(rf"(.*\.)?({pattern})$", module))
        return next(found, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _read_config(path: Path) -> _Config:
    if (num_bytes := path.stat().st_size) > _MAX_CONFIG_BYTES:
        raise LoraError(f"it has {num_bytes} bytes, the limit is {_MAX_CONFIG_BYTES}")
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise LoraError(f"it is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise LoraError("it holds no JSON object")
    if settings.get("peft_type") != "LORA":
        raise LoraError(f"peft_type is {_shown(settings.get('peft_type'))}, only 'LORA' is supported")
    for field, harmless in _UNSUPPORTED.items():
        value = settings.get(field)
        if value is not None and value not in harmless:
            expected = harmless[0] if harmless else None
            raise LoraError(f"{field} is {_shown(value)}, only {expected!r} is supported")
    alpha = _number("lora_alpha", settings.get("lora_alpha"))
    is_rank_stabilized = settings.get("use_rslora") or False
    if not isinstance(is_rank_stabilized, bool):
        raise LoraError(f"use_rslora is {_shown(is_rank_stabilized)}, it must be true or false")
    return _Config(alpha, _alphas(settings.get("alpha_pattern") or {}), is_rank_stabilized)


def _alphas(patterns: Any) -> dict[str, float]:
    if not isinstance(patterns, dict):
        raise LoraError(f"alpha_pattern is {_shown(patterns)}, it must map patterns to numbers")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise LoraError(f"alpha_pattern has {_shown(pattern)}, which is no pattern: {error}") from error
    return {pattern: _number(f"alpha_pattern[{pattern!r}]", alpha) for pattern, alpha in patterns.items()}


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise LoraError(f"{field} is {_shown(value)}, it must be a number")
    return value


def _pairs(keys: list[str], layers: Mapping[str, LinearShape]) -> dict[str, tuple[str, str]]:
    """Returns the keys of A and B by the name of their layer."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        tensor = f"the tensor {_shown(key)}"
        match = _KEY.fullmatch(key)
        if match is None:
            raise LoraError(f"{tensor} is not lora_A or lora_B of one of the language model's linear layers")
        if others := [part for part in match["front"].split(".") if part and part not in _DECODER_PARTS]:
            raise LoraError(f"{tensor} belongs to {others[0]!r}, only the language model's layers may have adapters")
        if match["module"] not in layers:
            raise LoraError(f"{tensor} is of {match['module']!r}, which is no linear layer of the model")
        halves = found.setdefault(match["module"], {})
        if match["half"] in halves:
            raise LoraError(f"the tensors {halves[match['half']]!r} and {_shown(key)} are of the same layer")
        halves[match["half"]] = key
    for name, halves in found.items():
        if len(halves) != 2:
            raise LoraError(f"{name!r} has lora_{next(iter(halves))}, but not both of lora_A and lora_B")
    if not found:
        raise LoraError("it holds no tensors")
    return {name: (halves["A"], halves["B"]) for name, halves in found.items()}


def _check_shapes(name: str, a: tuple[int, ...], b: tuple[int, ...], layer: LinearShape, max_rank: int) -> None:
    rank = a[0] if a else 0
    if a != (rank, layer.in_features) or b != (layer.out_features, rank) or rank < 1:
        raise LoraError(
            f"lora_A and lora_B of {name!r} are {list(a)} and {list(b)}, the model takes [rank, {layer.in_features}]"
            f" and [{layer.out_features}, rank]"
        )
    if rank > max_rank:
        raise LoraError(f"the rank of {name!r} is {rank}, the limit is {max_rank} (max_lora_rank)")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
