"""Towers stored in bfloat16 may round the rows of products to it: nearer to float32 than transformers in bfloat16."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from raylens.encoder.config import PartConfig
from raylens.modeling.packed_linear import KernelLinear
from tests.checkpoint_copies import copy_in_dtype
from tests.encoder.small_vision import Small
from tests.encoder.test_parts import distance, encoded, layers, load


def test_embeddings_are_nearer_than_those_of_transformers_in_bfloat16(small: Small, tmp_path: Path) -> None:
    stored = replace(small, checkpoint=copy_in_dtype(small.checkpoint, tmp_path, torch.bfloat16))
    configs = PartConfig(), PartConfig(linear="packed", exact=False), PartConfig(torch.bfloat16)
    exact, rounded, bfloat16 = ([one for one, _ in encoded(stored, load(stored, part, part))] for part in configs)
    for expected, ours, theirs in zip(exact, rounded, bfloat16, strict=True):
        assert ours.dtype == torch.float32
        assert distance(ours, expected) <= max(distance(theirs, expected), 2e-5)


def test_only_weights_of_16_bits_round_their_rows(small: Small, tmp_path: Path) -> None:
    part = PartConfig(linear="packed", exact=False)
    stored = replace(small, checkpoint=copy_in_dtype(small.checkpoint, tmp_path, torch.bfloat16))
    for one, parts in ((stored, {1}), (small, {3})):
        half = load(one, part, part)
        own: list[Any] = [half.get_submodule(name) for name in layers(half, KernelLinear)]
        assert {layer.packed_weight.row_parts for layer in own} <= parts
