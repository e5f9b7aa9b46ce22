"""What the programs do alike."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_every_form(
    forms: Iterable[str],
    quantize: Callable[[str, Path, Path], None],
    dequantized: Callable[[Path], dict[str, torch.Tensor]],
) -> None:
    """Takes SOURCE and TARGET from the command line. For each form, writes TARGET/FORM/quantized, and as
    TARGET/FORM/weights.safetensors what `dequantized` makes of that."""
    source, target = map(Path, sys.argv[1:])
    for form in forms:
        quantize(form, source, target / form / "quantized")
        save_file(dequantized(target / form / "quantized"), target / form / "weights.safetensors")
