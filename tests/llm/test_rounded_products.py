"""Models stored in bfloat16 may round the rows of products to it, on a processor with AMX."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.next_tokens import measure
from raylens.llm.config import EngineConfig
from raylens.llm.model_runner import ModelRunner
from raylens.modeling.packed_linear import KernelLinear
from tests.checkpoint_copies import copy_in_dtype
from tests.published_forms import publish


@pytest.mark.parametrize("variant", ["gemma3", "llava", "mllama", "qwen2_5_vl", "qwen3_5_moe"])
def test_next_tokens_are_nearer_to_float32_than_those_of_transformers_in_bfloat16(variant: str, tmp_path: Path) -> None:
    divergences = measure(variant, tmp_path, 4, 200, ["exact", "rounded"])
    assert divergences["exact"] < 1e-9
    assert divergences["rounded"] < divergences["transformers"]


@pytest.mark.parametrize(
    ("dtype", "settings", "parts"),
    [
        (torch.bfloat16, {"exact": False}, 1),
        (torch.float16, {"exact": False}, 2),
        (torch.float32, {"exact": False}, 3),
        (torch.float32, {"exact": False, "dtype": "bfloat16"}, 1),
        (torch.bfloat16, {"exact": False, "quantization": "int4"}, 1),
        (torch.bfloat16, {}, 3),
    ],
)
def test_rows_have_the_bits_of_the_weights(
    dtype: torch.dtype, settings: dict[str, Any], parts: int, shapes: str, tmp_path: Path
) -> None:
    assert parts_of(copy_in_dtype(shapes, tmp_path, dtype), **settings) == {parts}


@pytest.mark.parametrize(("dtype", "parts"), [(torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 3)])
def test_rows_have_the_bits_of_the_weights_beside_those_of_a_published_form(
    dtype: torch.dtype, parts: int, shapes: str, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    plain = copy_in_dtype(shapes, tmp_path / "plain", dtype)
    quantized, _ = publish("awq", plain, tmp_path, lambda name: "language_model" in name and "_proj" in name)
    assert parts_of(quantized, exact=False) == {parts}


def parts_of(checkpoint: str, **settings: Any) -> set[int]:
    """Returns those of all layers but the head, which is exact."""
    runner = ModelRunner(EngineConfig(checkpoint, kv_cache_bytes=2**22, **settings))
    found = {
        name: module.packed_weight.row_parts
        for name, module in runner._model.named_modules()
        if isinstance(module, KernelLinear)
    }
    assert {found.pop(name) for name in [*found] if "lm_head" in name} == {3}
    return set(found.values())
