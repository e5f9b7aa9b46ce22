"""Models that no family declares: the self-test accepts those that the three halves compute rightly, and names the half
that computes another one wrongly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raylens.deployments.stages import found_model_check
from raylens.deployments.stages.found_model_check import check_found_model
from raylens.deployments.stages.found_model_questions import SelfTestError, questions_of
from raylens.encoder.loader import load_vision_half
from raylens.llm.attention_variants import indexers
from raylens.llm.attention_variants.chosen_positions import ChosenPositions
from raylens.llm.attention_variants.indexers import _choose
from raylens.llm.attention_variants.reference_windows import ReferenceWindows
from raylens.modeling.families import FAMILIES, PARTLY_FOUND
from tests.model_coverage.parity import found_cases, ways_that_differ
from tests.model_coverage.small_checkpoints import save_small_checkpoint, save_with_a_talker
from tests.small_models import make_checkpoint

ACCEPTED = (
    *("cohere2_vision", "dots3_note", "ernie4_5_vl_moe", "gemma4_unified", "glm46v", "glm4v_moe", "glm5_next"),
    *("hunyuan_vl", "idefics2", "inkling2", "kimi_k25", "lfm2_vl", "llama4", "minimax_m3_vl", "mistral_large4"),
    *("nemotron_h_omni", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "qwen4_exp"),
    *("glmasr", "moss_transcribe_diarize", "qwen2_audio", "qwen3_asr"),  # only hear
)
"""One of each kind."""
SLOW = (
    *("aya_vision", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "exaone4_5", "glm4v", "glm_ocr", "glmga"),
    *("hyperclovax_vision_v2", "inkling_mm_model", "lfm3_vl", "lighton_ocr", "muse_glimmer", "ovis2"),
    *("video_llama_3", "video_llava"),
    # Towers and pictures of published sizes.
    *("deepseek_ocr2", "deepseek_vl_hybrid", "emu3", "fast_vlm", "gemma4", "got_ocr2", "granite4_vision"),
    *("granite_docling", "llava_next_video", "muse_spark", "perception_lm", "pp_chart2table", "qianfan_ocr", "step3p7"),
    "unlimited_ocr",
)
INDEXED = (
    *("glm5_next", "minimax_m3_vl"),
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("dots3_note", "mistral_large4", "qwen4_exp")),
)
LENGTHS = {"index_topk": 2048, "index_block_size": 128, "index_topk_blocks": 16, "indexer_budget": 2048}
"""Settings with the length of an indexer's choice, as published."""


@pytest.mark.parametrize("model_type", [*ACCEPTED, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_halves_that_compute_the_same_as_the_model_are_accepted(model_type: str, tmp_path: Path) -> None:
    save_small_checkpoint(model_type, tmp_path)
    assert check_found_model(str(tmp_path), None).startswith("found, self-tested: ")


@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl"])
def test_families_with_a_declaration_need_none(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(model_type, tmp_path)
    monkeypatch.delitem(FAMILIES, model_type)
    assert check_found_model(str(tmp_path), None)


@pytest.mark.long
def test_sounds_of_a_declared_family_are_those_of_the_model(tmp_path: Path) -> None:
    make_checkpoint("gemma3n", tmp_path)
    assert "sounds by model.get_audio_features" in check_found_model(str(tmp_path), None)


def test_a_prompt_that_is_not_the_processors_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small_checkpoint("idefics2", tmp_path)
    monkeypatch.delitem(PARTLY_FOUND, "idefics2")
    message = "Preprocess: 1 pictures and a text give 369 tokens, the model's processor gives other 370"
    with pytest.raises(SelfTestError, match=message):
        check_found_model(str(tmp_path), None)


def test_experts_for_tokens_of_a_picture_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small_checkpoint("ernie4_5_vl_moe", tmp_path)
    monkeypatch.delitem(PARTLY_FOUND, "ernie4_5_vl_moe")
    with pytest.raises(SelfTestError, match="Generate: log probabilities of the prompt differ"):
        check_found_model(str(tmp_path), None)


def test_tokens_of_a_picture_that_see_each_other_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the configuration nor the decoder tells of them."""
    make_checkpoint("gemma3", tmp_path)
    monkeypatch.delitem(FAMILIES, "gemma3")
    with pytest.raises(SelfTestError, match="Generate: log probabilities of the prompt differ"):
        check_found_model(str(tmp_path), None)


@pytest.mark.slow
def test_pictures_of_a_large_gemma_4_are_spans_in_layers_with_a_window(tmp_path: Path) -> None:
    save_small_checkpoint("gemma4", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["text_config"]["use_bidirectional_attention"] = "vision"
    assert {"full_attention", "sliding_attention"} == set(settings["text_config"]["layer_types"])
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert check_found_model(str(tmp_path), None)
    assert ways_that_differ(str(tmp_path), found_cases(str(tmp_path))) == []


@pytest.mark.parametrize("model_type", INDEXED)
def test_choices_of_an_indexer_longer_than_the_prompt_are_shortened(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With published lengths an indexer chooses all positions of the test's prompts."""
    save_small_checkpoint(model_type, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["text_config"] |= {name: LENGTHS[name] for name in settings["text_config"].keys() & LENGTHS.keys()}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert check_found_model(str(tmp_path), None)

    def choose_all(*args: Any) -> torch.Tensor:
        mask = _choose(*args)
        return torch.ones_like(mask).tril(mask.shape[-1] - mask.shape[-2])

    monkeypatch.setattr(indexers, "_choose", choose_all)
    with pytest.raises(SelfTestError, match="Generate: log probabilities of the prompt differ"):
        check_found_model(str(tmp_path), None)


@pytest.mark.slow
def test_a_window_longer_than_the_answer_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the published window of 128 tokens an answer of the test sees all of itself."""
    save_small_checkpoint("unlimited_ocr", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["text_config"]["sliding_window"] = 128
    (tmp_path / "config.json").write_text(json.dumps(settings))

    def see_all(windows: ReferenceWindows, chunk: ChosenPositions, prompt_length: int) -> torch.Tensor:
        mask = _mask(windows, chunk, prompt_length)
        return torch.ones_like(mask).tril(mask.shape[1] - mask.shape[0])

    _mask = ReferenceWindows._mask
    monkeypatch.setattr(ReferenceWindows, "_mask", see_all)
    with pytest.raises(SelfTestError, match="Generate: log probabilities differ"):
        check_found_model(str(tmp_path), None)


def test_a_model_with_pickled_weights_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    save_small_checkpoint("glm46v", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "transformers_weights": "adapter_model.bin"}))
    with pytest.raises(ValueError, match="its weights are in adapter_model.bin, and no pickled weights are read"):
        check_found_model(str(tmp_path), None)


def changed(load: Callable[..., tuple[Any, Any]], path: str) -> Callable[..., tuple[Any, Any]]:
    def load_changed(*args: Any) -> tuple[Any, Any]:
        model, family = load(*args)
        with torch.no_grad():
            model.get_parameter(path).view(-1)[0] += 10
        return model, family

    return load_changed


@pytest.mark.parametrize(
    ("model_type", "weight", "message"),
    [
        ("glm46v", "model.visual.blocks.0.attn.proj.weight", "Encode: a picture's embeddings differ by"),
        ("qwen3_omni_moe_thinker", "model.audio_tower.proj1.weight", "Encode: a sound's embeddings differ by"),
    ],
)
def test_one_changed_weight_of_a_tower_is_noticed(
    model_type: str, weight: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_checkpoint(model_type, tmp_path)
    monkeypatch.setattr(found_model_check, "load_vision_half", changed(load_vision_half, weight))
    with pytest.raises(SelfTestError, match=message):
        check_found_model(str(tmp_path), None)


@pytest.mark.parametrize("model_type", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_the_thinker_of_a_model_that_speaks_is_accepted(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "thinker").mkdir()
    (tmp_path / "whole").mkdir()
    save_small_checkpoint(model_type, tmp_path / "thinker")
    save_with_a_talker(tmp_path / "thinker", tmp_path / "whole")
    assert check_found_model(str(tmp_path / "whole"), None) == check_found_model(str(tmp_path / "thinker"), None)


def test_models_that_hear_are_asked_with_sounds(tmp_path: Path) -> None:
    save_small_checkpoint("qwen3_omni_moe_thinker", tmp_path)
    questions = questions_of(str(tmp_path))
    assert [[info.modality for info, _ in one.items] for one in questions[2:4]] == [
        ["audio"],
        ["audio", "image", "audio"],
    ]
    assert "sounds by model.get_audio_features" in check_found_model(str(tmp_path), None)


def test_sounds_without_their_lengths_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions depend on them."""
    save_small_checkpoint("qwen3_omni_moe_thinker", tmp_path)
    monkeypatch.setattr("raylens.preprocess.models.found._LENGTHS", "another")
    with pytest.raises(SelfTestError, match="Generate: TypeError"):
        check_found_model(str(tmp_path), None)
