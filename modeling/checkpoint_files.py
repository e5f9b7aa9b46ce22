"""Looks at a checkpoint's files before a server starts: a broken one is found within a second."""

import json
from collections import defaultdict
from pathlib import Path

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
        with safe_open(file, framework="pt") as opened:
            missing = weights - set(opened.keys())
    except FileNotFoundError:
        return f"is missing, and {INDEX_NAME} names it"
    except (SafetensorError, OSError) as error:
        return f"is cut off or damaged: {error}"
    return f"has no {min(missing)}, and {INDEX_NAME} says so" if missing else None
