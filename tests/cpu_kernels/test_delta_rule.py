"""One token of the gated delta rule by the kernel, beside transformers' function."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from raylens.cpu_kernels.delta_rule import delta_step
from raylens.cpu_kernels.library import KernelLibrary


@pytest.mark.parametrize(
    ("batch_size", "num_heads", "key_dim", "value_dim"), [(1, 2, 8, 16), (3, 4, 24, 80), (2, 16, 128, 128)]
)
def test_outputs_and_states_equal_transformers(
    library: KernelLibrary, batch_size: int, num_heads: int, key_dim: int, value_dim: int
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, key = draw(batch_size, 1, num_heads, key_dim), draw(batch_size, 1, num_heads, key_dim)
    value, states = draw(batch_size, 1, num_heads, value_dim), draw(batch_size, num_heads, key_dim, value_dim)
    logarithms, beta = -draw(batch_size, 1, num_heads).abs(), draw(batch_size, 1, num_heads).sigmoid()
    expected, expected_states = torch_recurrent_gated_delta_rule(
        query, key, value, g=logarithms, beta=beta, initial_state=states, output_final_state=True
    )
    outputs = delta_step(
        library,
        states.flatten(0, 1),
        (query * key_dim**-0.5).reshape(-1, key_dim),
        key.reshape(-1, key_dim),
        value.reshape(-1, value_dim),
        logarithms.exp().flatten(),
        beta.flatten(),
    )
    torch.testing.assert_close(outputs.view_as(expected), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)


def test_other_shapes_are_refused(library: KernelLibrary) -> None:
    heads, rows = torch.zeros(2), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="matching shapes"):
        delta_step(library, torch.zeros(2, 8, 16), rows, rows, torch.zeros(2, 32), heads, heads)
    with pytest.raises(ValueError, match="matching shapes"):
        delta_step(library, torch.zeros(2, 8, 6), rows, rows, torch.zeros(2, 6), heads, heads)
