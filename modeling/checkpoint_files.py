"""Looks at a checkpoint's files: before a server starts, a broken one is found within a second."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
HOW_TO_CONVERT = "`raylens convert safetensors SRC DST` writes a copy as safetensors"
_TOKENIZERS = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken", "spm.*")


def why_broken(folder: Path) -> str | None:
    """Returns what is wrong with a checkpoint's files, beginning with the file's name, or None.

    The weights themselves are not read: only that each file is as long as its header says, and has the weights that the
    index says."""
    if not any(True for pattern in _TOKENIZERS for _ in folder.glob(pattern)):
        return f"{_TOKENIZERS[0]} is missing, and no other file of a tokenizer is there"
    try:
        named = _indexed(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{INDEX_NAME} is not an index of weights"
    files = {file.name: file for file in folder.glob("*.safetensors")}
    if not named and not files:
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        why_not = f"; no pickled weights are read ({pickles[0]}): {HOW_TO_CONVERT}" if pickles else ""
        return f"model.safetensors is missing{why_not}"
    reasons = ((name, _why_unreadable(folder / name, named.get(name, set()))) for name in sorted(named or files))
    return next((f"{name} {reason}" for name, reason in reasons if reason is not None), None)


def text_section(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the section for the text model of a config.json, or None if it has no such section."""
    names = ("text_config", "llm_config", "language_config")
    return next((settings[name] for name in names if isinstance(settings.get(name), dict)), None)


def num_weight_bytes(folder: Path) -> int:
    """Returns the size of a checkpoint's files of weights that its index names, or of all without an index."""
    names = _indexed(folder) or (file.name for file in folder.glob("*.safetensors"))
    return sum((folder / name).stat().st_size for name in names)


def _indexed(folder: Path) -> dict[str, set[str]]:
    """Returns the weights of each file by the checkpoint's index, or nothing without one."""
    index = folder / INDEX_NAME
    named: defaultdict[str, set[str]] = defaultdict(set)
    if index.exists():
        for weight, name in json.loads(index.read_text())["weight_map"].items():
            named[name].add(weight)
    return dict(named)


def _why_unreadable(file: Path, weights: set[str]) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:  # "pt" would import torch
            missing = weights - set(opened.keys())
    except FileNotFoundError:
        return f"is missing, and {INDEX_NAME} names it"
    except (SafetensorError, OSError) as error:
        return f"is cut off or damaged: {error}"
    return f"has no {min(missing)}, and {INDEX_NAME} says so" if missing else None


def find_file(model: str, name: str, revision: str | None = None) -> Path | None:
    """Returns the path of a checkpoint's file, or None if it has no such file. `model`: a folder or a hub id."""
    from transformers.utils import cached_file

    found = cached_file(
        model,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def read_json(model: str, name: str, revision: str | None = None) -> Any:
    """Returns the content of a checkpoint's JSON file, or None if it has no such file. Raises ValueError for another
    content."""
    if (file := find_file(model, name, revision)) is None:
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{model}: {name} is not JSON: {error}") from error


def read_tensors(model: str, folder: str, names: Sequence[str], revision: str | None = None) -> "dict[str, Tensor]":
    """Returns those of the named tensors that the safetensors files of a checkpoint's folder have. `folder`: empty, or
    with a slash at its end."""
    from safetensors import safe_open

    index = read_json(model, f"{folder}{INDEX_NAME}", revision) or {"weight_map": {}}
    found: dict[str, Tensor] = {}
    for name in names:
        file = find_file(model, folder + index["weight_map"].get(name, "model.safetensors"), revision)
        if file is not None:
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name)} if name in set(opened.keys()) else {}
    return found
