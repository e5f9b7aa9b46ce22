"""Generate runs language halves that no family declares: greedy tokens equal those of `generate`.

`tests/llm/test_language_families.py` has the families with a declaration."""

from pathlib import Path

import pytest
import torch

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.models.found import find_language_family
from tests.model_coverage.language_requests import answers, request, save_tokenizer, small_model

DENSE = (
    *("aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_vl_hybrid", "emu3"),
    *("exaone4_5", "fast_vlm", "glm46v", "glm4v", "glm_ocr", "glmga", "got_ocr2", "granite_docling", "hunyuan_vl"),
    *("hyperclovax_vision_v2", "idefics2", "lighton_ocr", "llava_next_video", "muse_glimmer", "ovis2", "paddleocr_vl"),
    *("perception_lm", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "video_llama_3", "video_llava"),
)
WITH_EXPERTS = (
    *("deepseek_ocr2", "ernie4_5_vl_moe", "glm4v_moe", "kimi_k25", "muse_spark", "qwen3_omni_moe_thinker"),
    "step3p7",
)
CHOOSING = ("dots3_note", "glm5_next", "minimax_m3_vl", "mistral_large4", "unlimited_ocr")
BIASED = ("inkling_mm_model", "inkling2")
DECLARED = ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
"""Families that declare what can be found as well, because they also check their items."""


@pytest.mark.parametrize(
    ("model_type", "text_type"),
    [*((one, None) for one in (*DENSE, *WITH_EXPERTS, *CHOOSING, *BIASED, *DECLARED)), ("mistral3", "mistral4")],
)
def test_found_halves_answer_as_generate_does(
    model_type: str, text_type: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(model_type, text_type)
    assert text_type in (None, model.config.get_text_config().model_type)
    family = find_language_family(model.config)
    with torch.inference_mode():
        requests = [request(model, seed, family.num_deepstack_levels(model.config)) for seed in range(3)]
    assert len({tuple(one.expected) for one in requests}) == len(requests), "answers must depend on the input"
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    monkeypatch.setattr("raylens.llm.loader.load_language_family", find_language_family)
    for budget, most_scores in ((2048, 2**24), (11, 700)):
        monkeypatch.setattr("raylens.llm.attention_variants.distance_bias._MOST_SCORES", most_scores)
        config = EngineConfig(str(tmp_path), kv_cache_bytes=2**25, block_size=4, max_num_batched_tokens=budget)
        engine = LLMEngine(config)
        assert answers(engine, requests) == [one.expected for one in requests]
