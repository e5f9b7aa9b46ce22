"""Copies of a checkpoint with other weights in it."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def copy_checkpoint(source: str, folder: Path, rename: Callable[[str], str | None]) -> str:
    """Copies `source` into `folder` with every weight under the name that `rename` gives, or without it for None.

    Asserts that this changed something.
    """
    weights = _copy_files(source, folder)
    renamed: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if (new_name := rename(name)) is not None:
            renamed[new_name] = value
    assert renamed.keys() != weights.keys()
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def copy_in_dtype(source: str, folder: Path, dtype: torch.dtype, *, least_ndim: int = 0) -> str:
    """Copies `source` into `folder` with its weights of at least `least_ndim` dimensions in another dtype."""
    weights = _copy_files(source, folder)
    converted = {
        name: value.to(dtype) if value.is_floating_point() and value.ndim >= least_ndim else value
        for name, value in weights.items()
    }
    save_file(converted, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def _copy_files(source: str, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the copied weights."""
    for file in Path(source).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return load_file(folder / "model.safetensors")
