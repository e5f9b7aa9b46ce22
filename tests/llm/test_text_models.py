"""Every causal language model of transformers starts, or is refused with the reason."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raylens.llm.config import EngineConfig
from raylens.llm.model_runner import ModelRunner
from raylens.modeling.families import known_to

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOST_PARAMETERS = 5e6

# Each stands for a kind: what the engine runs, and the ways in which it cannot run others.
SERVED = ("apertus", "cohere", "gemma2", "granite", "llama", "mistral", "olmo2", "opt", "phi", "qwen3", "starcoder2")
REFUSED = {
    "falcon": "its attention layers cannot be replaced",
    "gptj": "its attention layers cannot be replaced",
    "bert": "no decoder at 'model'",
    "bloom": "no decoder at 'model'",
    "gpt2": "no decoder at 'model'",
    "gpt_neox": "no decoder at 'model'",
    "rwkv": "no decoder at 'model'",
    "mamba": "no layer has a KV cache",
    "gpt_oss": "s_aux",
}
OTHERS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {*SERVED, *REFUSED, *known_to("llm")})


def start(model_type: str, folder: Path) -> None:
    """Starts an engine's runner with a small model of this type, whose weights are random. Skips a type that cannot be
    made small by the settings that most share."""
    settings = {name: value for name, value in SMALL.items() if model_type != "falcon" or name != "num_key_value_heads"}
    try:
        config = AutoConfig.for_model(model_type, **settings)
        with torch.device("meta"):
            size = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            pytest.skip(f"{model_type} has {size} parameters")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    except Exception as error:
        pytest.skip(f"transformers makes no small {model_type}: {error!r}")
    ModelRunner(EngineConfig(str(folder), kv_cache_bytes=2**22, max_num_seqs=2))


@pytest.mark.parametrize("model_type", SERVED)
def test_text_models_start(tmp_path: Path, model_type: str) -> None:
    start(model_type, tmp_path)


@pytest.mark.parametrize("model_type", REFUSED)
def test_text_models_that_cannot_work_are_refused_with_the_reason(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[model_type]):
        start(model_type, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OTHERS)
def test_other_text_models_start_or_are_refused(tmp_path: Path, model_type: str) -> None:
    try:
        start(model_type, tmp_path)
    except ValueError as error:
        if "support" not in str(error) and "max_position_embeddings" not in str(error):
            raise
