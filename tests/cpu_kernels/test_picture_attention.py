"""Attention of pictures: each patch sees its own picture, whatever the others are."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raylens.cpu_kernels.attention import attend_pictures
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.packed_weight import EXACT

EVERY_LIBRARY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
dims = st.integers(1, 40) | st.sampled_from([64, 80])


@pytest.mark.parametrize("row_parts", [EXACT, 1])
@EVERY_LIBRARY
@given(
    lengths=st.lists(st.integers(0, 40) | st.integers(120, 300), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_dim=dims,
    value_dim=dims,
    seed=st.integers(0, 2**32),
)
def test_pictures_of_any_sizes_attend_each_to_itself(
    library: KernelLibrary,
    row_parts: int,
    lengths: list[int],
    kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_patches = sum(lengths)
    queries = torch.randn(num_patches, kv_heads * group, key_dim, generator=generator)
    keys = torch.randn(num_patches, kv_heads, key_dim, generator=generator)
    # As the towers have them: a part of rows that hold more.
    values = torch.randn(kv_heads, num_patches, 2 * value_dim, generator=generator).transpose(0, 1)[..., :value_dim]
    starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    numbers = {"scaling": key_dim**-0.5, "row_parts": row_parts}
    rounds = library.build == "amx" and row_parts == 1
    output = attend_pictures(library, queries, keys, values, starts, **numbers)
    for start, length in zip(starts, lengths, strict=False):
        own_queries, own_keys, own_values = (rows[start : start + length] for rows in (queries, keys, values))
        expected = reference(own_queries, own_keys, own_values, group, rounds=rounds)
        error = 2**-9 * float(values.abs().amax()) if rounds and num_patches else 0.0
        torch.testing.assert_close(output[start : start + length], expected, rtol=1e-5, atol=error + 1e-5)
        alone = attend_pictures(library, own_queries, own_keys, own_values, [0, length], **numbers)
        assert torch.equal(alone, output[start : start + length])


def reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: int, *, rounds: bool
) -> torch.Tensor:
    """By the definition, in float64. `rounds`: with values in bfloat16."""
    values = values.bfloat16() if rounds else values
    keys, values = (kept.double().repeat_interleave(group, dim=1) for kept in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * queries.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).float()
