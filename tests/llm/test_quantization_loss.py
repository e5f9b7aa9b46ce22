"""The KL divergence that `quantization` tells at start, by the logits that the model and its quantized self give."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.next_tokens import our_logits, takes_text
from raylens.llm import engine
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.model_runner import ModelRunner
from raylens.llm.quantization_loss import QuantizationLoss
from raylens.modeling.packed_linear import KernelLinear
from tests.checkpoint_copies import copy_in_dtype
from tests.llm.language_variants import VARIANTS
from tests.small_models import whole_class

TOKENS = [*b"a text of some twenty letters"]


def runner_of(checkpoint: str, **settings: Any) -> ModelRunner:
    return ModelRunner(EngineConfig(checkpoint, kv_cache_bytes=2**24, max_num_batched_tokens=64, **settings))


@pytest.mark.parametrize("name", ["gemma3", "mllama", "qwen2_5_vl", "qwen3_5"])
def test_it_is_the_divergence_from_float32_over_the_stored_weights(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    for one in ("float32", "bfloat16"):
        (tmp_path / one).mkdir()
    checkpoint = copy_in_dtype(variant.checkpoint(tmp_path / "float32"), tmp_path / "bfloat16", torch.bfloat16)
    whole = whole_class(variant.model_type).from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        stored = whole(input_ids=torch.tensor([TOKENS])).logits[0]
    prefixes = [TOKENS[: length + 1] for length in range(len(TOKENS))]
    quantized = our_logits(checkpoint, prefixes, quantization="int4")
    expected = QuantizationLoss.of(stored, quantized)
    found = runner_of(checkpoint, quantization="int4").quantization_loss(TOKENS)
    assert found is not None
    assert found.divergence == pytest.approx(expected.divergence, rel=1e-3)
    assert found[1:] == expected[1:]


@pytest.mark.parametrize("name", [name for name, one in VARIANTS.items() if not takes_text(one.model_type)])
def test_a_model_that_needs_a_picture_is_no_reason_to_fail(name: str, tmp_path: Path) -> None:
    runner_of(VARIANTS[name].checkpoint(tmp_path), quantization="int8").quantization_loss(TOKENS)


def test_afterwards_the_stored_weights_are_gone(shapes: str) -> None:
    runner = runner_of(shapes, quantization="int8")
    layers = [one for one in runner._model.modules() if isinstance(one, KernelLinear)]
    assert any(one.stored is not None for one in layers)
    assert runner.quantization_loss(TOKENS) is not None
    assert runner.quantization_loss(TOKENS) is None
    assert not any("forward" in vars(one) or one.stored is not None for one in layers)


def test_without_quantization_there_is_nothing_to_compare(shapes: str) -> None:
    assert runner_of(shapes).quantization_loss(TOKENS) is None


def test_the_engine_tells_it_at_start(shapes: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, engine.logger.name):
        LLMEngine(EngineConfig(shapes, kv_cache_bytes=2**22, quantization="int4"))
    (line,) = (one.message for one in caplog.records if one.name == engine.logger.name)
    assert line.startswith("quantization int4: mean KL divergence from the stored weights 0.")
