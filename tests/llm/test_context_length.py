"""`max_model_len` and the number of positions that a model is made for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.context_length import check_context_length, default_context_length
from raylens.preprocess.schema import ProcessedPrompt
from tests.small_models import make_checkpoint

PROMPT = [1, *range(20, 40)]


def engine_of(checkpoint: str, **settings: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(checkpoint, max_num_seqs=2, kv_cache_bytes=2**22, **settings))


def answer(engine: LLMEngine, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    engine.add_request("r", ProcessedPrompt(prompt, [], []), [], params)
    found: list[int] = []
    while engine.has_unfinished():
        found += [token_id for output in engine.step() for token_id in output.token_ids]
    return found


def test_more_positions_than_the_model_is_made_for_are_refused_unless_allowed(shapes: str, tmp_path: Path) -> None:
    folder = shutil.copytree(shapes, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is 64, but .*\(llama\) is made for 32 positions: .*allow_longer"):
        engine_of(str(folder), max_model_len=64)
    assert engine_of(str(folder)).max_model_len == 32
    longer = engine_of(str(folder), max_model_len=64, allow_longer_context=True)
    assert answer(longer, PROMPT, 40) == answer(engine_of(shapes), PROMPT, 40)


def test_learned_positions_end_where_their_table_ends(tmp_path: Path) -> None:
    folder = make_checkpoint("blip-2", tmp_path, {"max_position_embeddings": 32})
    for allowed in (False, True):
        with pytest.raises(ValueError, match=r"max_model_len is 33, but .*\(opt\) is made for 32 positions: its posit"):
            engine_of(folder, max_model_len=33, allow_longer_context=allowed)
    engine = engine_of(folder, max_model_len=32)
    assert len(answer(engine, PROMPT, 32 - len(PROMPT))) == 32 - len(PROMPT)


def text_config(model_type: str = "llama", **settings: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **settings)
    return config.get_text_config()


@pytest.mark.parametrize("allowed", [False, True])
def test_chunked_attention_ends_with_the_first_chunk(allowed: bool) -> None:
    config = text_config("llama4_text", attention_chunk_size=256, max_position_embeddings=4096)
    assert default_context_length(config, None) == 256
    check_context_length(config, 256, allow_longer=allowed)
    with pytest.raises(ValueError, match="is 257, but .* made for 256 positions: within a chunk its attention is full"):
        check_context_length(config, 257, allow_longer=allowed)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (text_config(max_position_embeddings=100), 100),
        # The length before the scaling, or behind it.
        (text_config(max_position_embeddings=100, rope_parameters=YARN), 400),
        (
            text_config(max_position_embeddings=400, rope_parameters={**YARN, "original_max_position_embeddings": 100}),
            400,
        ),
        (text_config(max_position_embeddings=100, rope_parameters={**YARN, "rope_type": "linear"}), 400),
        # A window bounds what a token sees, not its position. Layers of two kinds have rotations of their own.
        (text_config("gemma3_text", max_position_embeddings=100, sliding_window=10), 100),
        (text_config("mistral", max_position_embeddings=100, sliding_window=10), 100),
        (text_config("gpt2", n_positions=100), 100),
        (text_config("qwen2_vl", text_config={"max_position_embeddings": 100}), 100),
    ],
)
def test_the_longest_context_is_that_of_the_text_models_positions(config: PreTrainedConfig, own: int) -> None:
    check_context_length(config, own, allow_longer=False)
    with pytest.raises(ValueError, match=f"max_model_len is {own + 1}, but .* {own} positions"):
        check_context_length(config, own + 1, allow_longer=False)


def test_a_model_without_a_length_takes_the_one_of_the_settings() -> None:
    bloom = text_config("bloom")
    check_context_length(bloom, 10**6, allow_longer=False)
    assert default_context_length(bloom, 77) == 77
    with pytest.raises(ValueError, match=r"model \(bloom\) has no max_position_embeddings: set max_model_len"):
        default_context_length(bloom, None)
