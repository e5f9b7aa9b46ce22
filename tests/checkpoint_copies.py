"""Copies of a checkpoint with other weights in it."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def copy_checkpoint(source: str, folder: Path, rename: Callable[[str], str | None]) -> str:
    """Copies `source` into `folder` with every weight under the name that `rename` gives, or without it for None.

    Asserts that this changed something.
    """
    for file in Path(source).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    renamed: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if (new_name := rename(name)) is not None:
            renamed[new_name] = value
    assert renamed.keys() != weights.keys()
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
