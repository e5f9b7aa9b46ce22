"""Quantized checkpoints answer as their numbers in float32 do, and keep their bits where the kernels have the form."""

from pathlib import Path

import pytest
import torch

from raylens.cpu_kernels.library import VARIABLE
from raylens.cpu_kernels.packed_weight import Form
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.loader import load_language_half
from raylens.modeling.packed_linear import KernelLinear
from tests.checkpoint_copies import copy_checkpoint
from tests.llm.greedy_answers import answers
from tests.llm.ranks import silent_rank
from tests.published_forms import FORMS, publish
from tests.small_models import Json, make_checkpoint, small_requests, whole_class

SIZES: Json = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
STORED: dict[str, Form] = {
    "gptq, 8 bits": "int8",
    "gptq, ordered columns": "float32",  # whose groups lie in no order
    "compressed-tensors, W8A16": "int8",
    "compressed-tensors, W8A8": "int8",
    "compressed-tensors, FP8": "float8",
    "compressed-tensors, FP8 with one scale": "float8",
    "fp8 in blocks": "float8",
}
"""By form: the numbers in memory, if not int4."""


def is_quantized(name: str) -> bool:
    return "language_model" in name and "_proj" in name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llava", tmp_path_factory.mktemp("plain"), SIZES)


def make_engine(checkpoint: str) -> LLMEngine:
    return LLMEngine(EngineConfig(checkpoint, kv_cache_bytes=2**22))


@pytest.mark.parametrize("kernels", ["", "off"])
@pytest.mark.parametrize("form", FORMS)
def test_a_published_form_answers_as_generate_does_with_its_numbers(
    form: str, kernels: str, plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    quantized, dequantized = publish(form, plain, tmp_path, is_quantized)
    engine = make_engine(quantized)
    oracle = whole_class("llava").from_pretrained(dequantized, dtype=torch.float32).eval()
    requests = small_requests("llava", oracle)
    assert answers(engine, requests) == [one.expected for one in requests]
    if not kernels:
        assert engine._runner.forward.fused is not None
        layers = engine._runner._decoder.modules()
        forms = {layer.packed_weight.layout.form for layer in layers if isinstance(layer, KernelLinear)}
        assert forms == {STORED.get(form, "int4")}


@pytest.mark.parametrize("form", ["awq", "fp8 in blocks", "compressed-tensors, W4A16"])
def test_a_rank_reads_its_part_of_the_numbers(form: str, plain: str, tmp_path: Path) -> None:
    quantized, dequantized = publish(form, plain, tmp_path, is_quantized)
    halves = [load_language_half(EngineConfig(folder), silent_rank(1, 2))[0] for folder in (quantized, dequantized)]
    ours, expected = (dict(half.named_parameters()) for half in halves)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_an_unsupported_method_is_named(plain: str, tmp_path: Path) -> None:
    quantized, _ = publish("awq", plain, tmp_path, is_quantized)
    config = Path(quantized) / "config.json"
    config.write_text(config.read_text().replace('"awq"', '"bitsandbytes"'))
    with pytest.raises(
        ValueError, match="weights quantized by 'bitsandbytes' are not supported: take one of awq, gptq"
    ):
        make_engine(quantized)


def test_a_missing_tensor_is_named(plain: str, tmp_path: Path) -> None:
    quantized, _ = publish("awq", plain, tmp_path, is_quantized)
    broken = copy_checkpoint(
        quantized, _new(tmp_path), lambda name: None if name.endswith("layers.1.mlp.up_proj.scales") else name
    )
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj has no scales"):
        make_engine(broken)


def _new(folder: Path) -> Path:
    (folder / "broken").mkdir()
    return folder / "broken"
