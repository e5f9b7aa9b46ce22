"""RMS norms by the kernel, beside transformers' norm."""

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.norm import Norm, normed


@pytest.mark.parametrize("shape", [(8,), (1, 80), (70, 19), (3, 45, 1280), (0, 16)], ids=str)
def test_norms_equal_transformers(library: KernelLibrary, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = Qwen2RMSNorm(shape[-1], eps=1e-5)
    norm.weight.data = torch.randn(shape[-1], generator=generator)
    rows = torch.randn(shape, generator=generator)
    found = normed(library, Norm(norm.weight.detach(), 1e-5), rows)
    torch.testing.assert_close(found, norm(rows), rtol=1e-5, atol=1e-6)


def test_rows_need_not_be_contiguous(library: KernelLibrary) -> None:
    rows, norm = torch.randn(6, 2, 24), Norm(torch.ones(24), 1e-6)
    assert torch.equal(normed(library, norm, rows[:, 1]), normed(library, norm, rows)[:, 1])


def test_other_rows_are_refused(library: KernelLibrary) -> None:
    for rows in (torch.zeros(2, 23), torch.zeros(2, 24, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="rows of 24 numbers"):
            normed(library, Norm(torch.ones(24), 1e-6), rows)
