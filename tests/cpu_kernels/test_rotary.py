"""Rotary embeddings by the kernel, beside transformers' function for towers."""

import pytest
import torch
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.rotary import rotated


@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 10), (70, 4, 80), (33, 16, 64), (0, 2, 8)], ids=str)
def test_rotations_equal_transformers(library: KernelLibrary, shape: tuple[int, int, int]) -> None:
    num_tokens, num_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(num_tokens, 3, num_heads, dim, generator=generator)  # as a projection of all three lies
    cosines, sines = torch.randn(2, num_tokens, dim, generator=generator)
    queries, keys = both[:, 0], both[:, 1]
    expected = apply_rotary_pos_emb_vision(queries, keys, cosines, sines)
    for heads, own in zip((queries, keys), expected, strict=True):
        torch.testing.assert_close(rotated(library, heads, cosines, sines), own, rtol=1e-5, atol=1e-5)
    in_columns = queries.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(rotated(library, in_columns, cosines, sines), rotated(library, queries, cosines, sines))


def test_other_shapes_and_dtypes_are_refused(library: KernelLibrary) -> None:
    heads, turns = torch.zeros(3, 2, 8), torch.zeros(3, 8)
    for other in (torch.zeros(2, 8), torch.zeros(3, 4), torch.zeros(1, 3, 8)):
        with pytest.raises(ValueError, match=r"takes \[3, 8\]"):
            rotated(library, heads, turns, other)
    with pytest.raises(ValueError, match=r"takes \[3, 7\]"):
        rotated(library, torch.zeros(3, 2, 7), torch.zeros(3, 7), torch.zeros(3, 7))
    with pytest.raises(ValueError, match="in float32"):
        rotated(library, heads.double(), turns, turns)
