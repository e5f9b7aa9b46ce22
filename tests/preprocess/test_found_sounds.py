"""Sounds of models that no family declares: each item is what the model's own processor makes of it."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from raylens.preprocess.media import AudioLimits, MediaLimits
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import InvalidRequestError
from tests.model_coverage.small_checkpoints import save_small_checkpoint
from tests.sounds import RATE, noise, recorded, tone

HEARING = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "gemma4", "nemotron_h_omni", "qwen2_audio")


@cache
def checkpoint(model_type: str) -> Path:
    folder = Path(mkdtemp())
    save_small_checkpoint(model_type, folder)
    return folder


@cache
def ours(model_type: str, limits: MediaLimits = MediaLimits()) -> MultiModalProcessor:  # noqa: B008  (it is frozen)
    return MultiModalProcessor(ProcessorConfig(str(checkpoint(model_type)), limits=limits))


@cache
def theirs(model_type: str) -> Any:
    return AutoProcessor.from_pretrained(checkpoint(model_type))


SOUNDS = {
    "the shortest": noise(0.1),
    "a second": noise(1.0),
    "of no whole frame": noise(0.87654),
    "silence": np.zeros(RATE, np.float32),
    "of ten seconds": noise(10.0),
}


@pytest.mark.parametrize("model_type", HEARING)
@pytest.mark.parametrize("name", SOUNDS)
def test_an_item_is_what_the_processor_makes_of_the_sound(model_type: str, name: str) -> None:
    info, tensors = ours(model_type).items.process("audio", recorded(SOUNDS[name], encoder="pcm_f32le"))
    processor = theirs(model_type)
    outputs = processor(text=[processor.audio_token], audio=[SOUNDS[name]], return_tensors="pt")
    assert info.expansion.token_ids.tolist() == outputs["input_ids"][0].tolist()
    assert info.num_embeds == (outputs["input_ids"] == processor.audio_token_id).sum()
    fields = tensors.keys() - info.language_inputs.keys()
    assert fields
    for field in fields:
        torch.testing.assert_close(tensors[field], outputs[field], rtol=0, atol=0)


@pytest.mark.parametrize("model_type", HEARING)
def test_the_processor_warns_of_no_sound(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    items, sound = ours(model_type).items, recorded(noise(1.0))
    caplog.clear()
    items.process("audio", sound)
    assert not caplog.records


@pytest.mark.parametrize("model_type", HEARING)
def test_the_tokens_of_a_length_are_counted_without_a_sound(model_type: str) -> None:
    items = ours(model_type).items
    for num_samples in (1600, 16_000, 50_001):
        info, _ = items.process("audio", recorded(noise(num_samples / RATE)))
        assert items.expansion_for_size("audio", (num_samples,)).features == info.expansion.features
        assert items.blank_item("audio", (num_samples,))[0].num_embeds == info.num_embeds


def test_no_sound_has_more_tokens_than_the_largest() -> None:
    limits = MediaLimits(audio=AudioLimits(max_duration_s=20.0))
    assert ours("qwen3_omni_moe_thinker", limits).items.largest_size("audio") == (20 * RATE,)


@pytest.mark.parametrize("model_type", ["qwen2_5_omni_thinker", "gemma4"])
def test_a_sound_that_the_processor_would_cut_off_is_refused(model_type: str) -> None:
    items = ours(model_type).items
    items.process("audio", recorded(tone(30.0)))
    with pytest.raises(InvalidRequestError, match="the audio is longer than 30 s, the limit") as caught:
        items.process("audio", recorded(tone(30.1)))
    assert caught.value.code == "audio_too_long"


def test_a_processor_that_cuts_nothing_off_leaves_the_limit_to_the_server() -> None:
    content = recorded(tone(31.0))
    assert ours("qwen3_omni_moe_thinker").items.process("audio", content)[0].num_embeds == 31 * 13
    limits = MediaLimits(audio=AudioLimits(max_duration_s=20.0))
    with pytest.raises(InvalidRequestError, match="the audio is longer than 20 s, the limit"):
        ours("qwen3_omni_moe_thinker", limits).items.process("audio", content)


def test_a_model_that_does_not_hear_says_so() -> None:
    assert ours("glm46v").items.modalities == ("image",)
    with pytest.raises(InvalidRequestError, match="this model takes image, not audio") as caught:
        ours("glm46v").items.process("audio", recorded(tone(1.0)))
    assert caught.value.code == "unsupported_modality"


def test_settings_for_sounds_are_part_of_the_identity(tmp_path: Path) -> None:
    """They change items, so an item of other settings must not come from a cache."""
    save_small_checkpoint("qwen3_omni_moe_thinker", tmp_path)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    settings["feature_extractor"]["dither"] = 0.1
    before = MultiModalProcessor(ProcessorConfig(str(tmp_path))).items.identity("same").fingerprint
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    assert MultiModalProcessor(ProcessorConfig(str(tmp_path))).items.identity("same").fingerprint != before
