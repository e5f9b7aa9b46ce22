"""Layers in oneDNN's blocks compute what they stand for."""

import pytest
import torch
from torch import nn

from raylens.modeling.onednn_linear import OneDnnLinear, onednn_dtypes, padded_rows


@pytest.mark.parametrize("dtype", onednn_dtypes())
@pytest.mark.parametrize("shape", [(1,), (7,), (0,), (1, 1), (1, 33), (2, 65)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_the_same(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 130, bias=bias, dtype=dtype)
    inputs = torch.randn(*shape, 96, dtype=dtype)
    with torch.inference_mode():
        output, expected = OneDnnLinear(linear.weight, linear.bias)(inputs), linear(inputs)
    assert output.dtype == dtype
    assert output.shape == (*shape, 130)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


def test_numbers_of_rows_are_few_and_little_is_added() -> None:
    padded = [padded_rows(num_rows) for num_rows in range(1, 2049)]
    assert padded[:24] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 12, 12, 14, 14, 16, 16, *[20] * 4, *[24] * 4]
    assert all(num_rows <= rows < 1.25 * num_rows for num_rows, rows in enumerate(padded, start=1))
    assert len(set(padded)) == 40
