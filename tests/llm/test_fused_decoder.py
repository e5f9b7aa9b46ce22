"""Which decoders run in one call, and that those run layer by layer that would give something else."""

import logging
from pathlib import Path

import pytest
import torch

from raylens.llm.config import EngineConfig
from raylens.llm.cpu import fused_decoder
from raylens.llm.cpu.fused_decoder import FusedDecoder
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.logprobs import TokenLogprobs
from raylens.llm.sampling.params import SamplingParams
from tests.llm.greedy_answers import answers
from tests.llm.language_variants import VARIANTS
from tests.small_models import Request, small_requests, whole_class

LAYER_BY_LAYER = {
    "aria": "AriaTextDecoderLayer",
    "minicpm_ocr": "Qwen3_5DecoderLayer",
    "minicpmv4_6": "Qwen3_5DecoderLayer",
    "minicpmv4_7": "Qwen3_5DecoderLayer",
    "qwen3_5": "Qwen3_5DecoderLayer",
    "qwen3_5_moe": "Qwen3_5MoeDecoderLayer",
    "qwen3_vl_moe": "Qwen3VLMoeTextDecoderLayer",
    "phi4_multimodal": "Phi4MultimodalDecoderLayer",
    "blip-2": "OPTModel",
    "florence2": "BartDecoderLayer",
    "mllama": "MllamaCrossAttentionDecoderLayer",
    "chameleon": "ChameleonDecoderLayer",
    "fuyu": "PersimmonDecoderLayer",
    "gemma3n": "Gemma3nTextDecoderLayer",
    "mistral3, queries scaled by position": "Ministral3DecoderLayer",
    "molmo2": "Molmo2DecoderLayer",
    "wemm": "InternLM2DecoderLayer",
}
"""The variants whose layers are of a kind that does not run in one call, with what the log says of them."""


def make_engine(variant: str, folder: Path, **settings: object) -> LLMEngine:
    config = EngineConfig(VARIANTS[variant].checkpoint(folder), kv_cache_bytes=2**22, **settings)  # type: ignore[arg-type]
    return LLMEngine(config)


def answer_bits(engine: LLMEngine, one: Request) -> list[TokenLogprobs]:
    """The log-probabilities of an answer's tokens."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    engine.add_request("r", one.prompt, one.embeddings, params)
    logprobs: list[TokenLogprobs] = []
    while engine.has_unfinished():
        for output in engine.step():
            logprobs += output.logprobs
    return logprobs


def requests_of(engine: LLMEngine) -> list[Request]:
    checkpoint = engine._config.model
    model_type = engine._runner._model.config.model_type
    return small_requests(model_type, whole_class(model_type).from_pretrained(checkpoint, dtype=torch.float32).eval())


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_decoders_run_in_one_call(variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="raylens.llm"):
        fused = make_engine(variant, tmp_path)._runner.forward.fused
    said = [record.getMessage() for record in caplog.records if "one by one" in record.getMessage()]
    if variant in LAYER_BY_LAYER:
        assert fused is None
        assert LAYER_BY_LAYER[variant] in said[0]
    else:
        assert fused is not None
        assert not said


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}])
def test_weights_of_any_precision_run_in_one_call(settings: dict[str, str], tmp_path: Path) -> None:
    assert make_engine("llava", tmp_path, **settings)._runner.forward.fused is not None


def test_a_cache_of_another_dtype_does_not_run_in_one_call(tmp_path: Path) -> None:
    assert make_engine("llava", tmp_path, kv_cache_dtype="bfloat16")._runner.forward.fused is None


@pytest.mark.long
@pytest.mark.parametrize("tokens_per_step", [7, 512])
def test_one_call_computes_every_step_of_a_plain_decoder(
    tokens_per_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, decoding and both together: transformers' layers run no more once the engine has started."""
    engine = make_engine("llava", tmp_path, max_num_batched_tokens=tokens_per_step, max_num_seqs=7)
    requests = requests_of(engine)
    monkeypatch.setattr(engine._runner.forward, "run_layers", None)
    assert answers(engine, requests) == [one.expected for one in requests]


@pytest.mark.long
def test_a_decoder_that_gives_something_else_runs_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a layer of transformers changes: here the table forgets what Gemma adds to the weights of its norms."""
    monkeypatch.setitem(fused_decoder._KINDS, "GemmaDecoderLayer", fused_decoder._PLAIN)
    engine = make_engine("paligemma", tmp_path)
    assert engine._runner.forward.fused is None
    assert "the decoder's layers run one by one: fused they are off by" in caplog.text
    requests = requests_of(engine)
    assert answers(engine, requests) == [one.expected for one in requests]


@pytest.mark.long
@pytest.mark.parametrize("variant", ["gemma3", "qwen3_vl", "qwen2_vl", "paligemma"])
def test_items_and_positions_beyond_the_tables_run_in_one_call(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans, deepstack embeddings, and rotary tables of a single position."""
    make_fused = FusedDecoder.__init__

    def make_short(self: FusedDecoder, *args: object, num_positions: int, **others: object) -> None:
        make_fused(self, *args, num_positions=1, **others)  # type: ignore[arg-type]

    engine = make_engine(variant, tmp_path)
    requests = requests_of(engine)
    expected = [answer_bits(engine, one) for one in requests]
    monkeypatch.setattr(FusedDecoder, "__init__", make_short)
    engine = make_engine(variant, tmp_path)
    monkeypatch.setattr(engine._runner.forward, "run_layers", None)
    assert answers(engine, requests) == [one.expected for one in requests]
    assert [answer_bits(engine, one) for one in requests] == expected
