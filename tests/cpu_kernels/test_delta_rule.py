"""Tokens of the gated delta rule by the kernel, beside transformers' function."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from raylens.cpu_kernels.delta_rule import delta_rows
from raylens.cpu_kernels.library import KernelLibrary


@pytest.mark.parametrize(("num_heads", "key_dim", "value_dim"), [(2, 8, 16), (4, 24, 80), (16, 128, 128)])
@pytest.mark.parametrize(
    ("sources", "targets"),
    [([1], [1]), ([3, 1, 0], [3, 1, 0]), ([3, 0, 2, 1], [3, 2, 1, 4])],
    ids=["one", "in place", "continued"],
)
def test_outputs_and_states_equal_transformers(
    library: KernelLibrary, num_heads: int, key_dim: int, value_dim: int, sources: list[int], targets: list[int]
) -> None:
    generator, num_rows = torch.Generator().manual_seed(0), len(sources)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, key = draw(num_rows, num_heads, key_dim), draw(num_rows, num_heads, key_dim)
    value, states = draw(num_rows, num_heads, value_dim), draw(5, num_heads, key_dim, value_dim)
    logarithms, beta = -draw(num_rows, num_heads).abs(), draw(num_rows, num_heads).sigmoid()
    expected_states, expected = states.clone(), torch.zeros_like(value)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        own = (tensor[row, None, None] for tensor in (query, key, value))
        output, state = torch_recurrent_gated_delta_rule(
            *own,
            g=logarithms[row, None, None],
            beta=beta[row, None, None],
            initial_state=expected_states[source, None],
            output_final_state=True,
        )
        expected[row], expected_states[target] = output[0, 0], state[0]
    rows = (query * key_dim**-0.5, key, value, logarithms.exp(), beta)
    outputs = delta_rows(library, states, sources, targets, *rows)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)


def test_other_shapes_and_slots_are_refused(library: KernelLibrary) -> None:
    heads, rows = torch.zeros(1, 2), torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="matching shapes"):
        delta_rows(library, torch.zeros(3, 2, 8, 16), [0], [0], rows, rows, torch.zeros(1, 2, 32), heads, heads)
    with pytest.raises(ValueError, match="matching shapes"):
        delta_rows(library, torch.zeros(3, 2, 8, 6), [0], [0], rows, rows, torch.zeros(1, 2, 6), heads, heads)
    for sources, targets in (([3], [0]), ([0], [-1]), ([0], [0, 1])):
        with pytest.raises(ValueError, match="below 3"):
            delta_rows(
                library, torch.zeros(3, 2, 8, 16), sources, targets, rows, rows, torch.zeros(1, 2, 16), heads, heads
            )
