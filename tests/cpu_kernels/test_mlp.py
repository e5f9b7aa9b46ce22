"""MLPs in one call: near the definition with each activation, and a row is the same to the last bit among others."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, linear, silu

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.mlp import ACTIVATIONS, Activation, Mlp
from tests.cpu_kernels.packing import pack_linear

EVERY_LIBRARY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DEFINITIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "gelu": gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_to_float32(library: KernelLibrary, activation: Activation) -> None:
    """By layers of one weight, which is 1."""
    one = torch.ones(1, 1)
    mlp = Mlp(library, pack_linear(library, one, None), None, pack_linear(library, one, None), activation)
    inputs = torch.cat([torch.linspace(-12, 12, 20_001), torch.logspace(-30, 30, 601), -torch.logspace(-30, 30, 601)])
    expected = DEFINITIONS[activation](inputs.double()).float()
    torch.testing.assert_close(mlp.run(inputs[:, None])[:, 0], expected, rtol=2e-6, atol=1e-6)


@EVERY_LIBRARY
@given(
    sizes=st.tuples(*[st.integers(1, 70)] * 3),
    num_rows=st.integers(0, 40) | st.sampled_from([255, 256, 257, 600]),
    is_gated=st.booleans(),
    has_bias=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    seed=st.integers(0, 2**32),
)
def test_mlps_of_any_size(
    library: KernelLibrary,
    sizes: tuple[int, int, int],
    num_rows: int,
    is_gated: bool,
    has_bias: bool,
    activation: Activation,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def make_layer(columns: int, num_k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = torch.randn(columns, generator=generator) if has_bias else None
        return torch.randn(columns, num_k, generator=generator) / num_k**0.5, bias

    num_in, num_inner, num_out = sizes
    first, up, down = make_layer(num_inner, num_in), make_layer(num_inner, num_in), make_layer(num_out, num_inner)
    packed_up = pack_linear(library, *up) if is_gated else None
    mlp = Mlp(library, pack_linear(library, *first), packed_up, pack_linear(library, *down), activation)
    rows = torch.randn(num_rows, num_in, generator=generator)

    def apply(layer: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor) -> torch.Tensor:
        weight, bias = layer
        return linear(x, weight.double(), None if bias is None else bias.double())

    inner = DEFINITIONS[activation](apply(first, rows.double()))
    expected = apply(down, inner * apply(up, rows.double()) if is_gated else inner)
    output = mlp.run(rows)
    torch.testing.assert_close(output, expected.float(), rtol=1e-5, atol=2e-5)
    for row in range(0, num_rows, 1 + num_rows // 40):
        assert torch.equal(mlp.run(rows[row]), output[row])
