"""Answers of models whose rotary embeddings have another form for long sequences equal those of `generate`, which
computes all keys again when an answer outgrows the short form."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from tests.llm.answered import answer
from tests.model_coverage.language_requests import save_tokenizer

LONGEST_SHORT = 32
NUM_TOKENS = 12
LENGTHS = (5, 24, 28, 31, 32, 33, 40)
"""Of prompts: some answers stay in the short form, some outgrow it early or late, and some begin in the long one."""


def save_model(folder: Path) -> None:
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=400,
        max_position_embeddings=256,
        original_max_position_embeddings=LONGEST_SHORT,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": LONGEST_SHORT,
            "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8,
        },
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    save_tokenizer(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    ids = torch.randint(3, 400, (max(LENGTHS),), generator=torch.Generator().manual_seed(0)).tolist()
    return [ids[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(checkpoint: str, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist())
    return found


def engine_of(checkpoint: str, **settings: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(checkpoint, **{"kv_cache_bytes": 2**22, "block_size": 4, **settings}))


def answers(engine: LLMEngine, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, **settings)
    found = answer(engine, prompts, params)
    return [found[f"{index}.0"].token_ids for index in range(len(prompts))]


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_caching": False},
        {"prefix_caching": False, "max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"prefix_caching": False, "kv_cache_bytes": 2**12 * 25},
        {},
        {"prompt_lookup": False, "async_scheduling": True},
    ],
    ids=["together", "in chunks", "few blocks", "cached prefixes", "launched ahead"],
)
def test_answers_equal_generate(
    checkpoint: str, prompts: list[list[int]], expected: list[list[int]], settings: dict[str, Any]
) -> None:
    engine = engine_of(checkpoint, **settings)
    for _ in range(2):  # prompts begin alike, so that a prefix of the other form may be cached
        assert answers(engine, prompts) == expected
    assert [answers(engine, [prompt])[0] for prompt in prompts[::-1]] == expected[::-1]


def test_guesses_of_an_answer_stay_in_its_form(checkpoint: str) -> None:
    """Of three tokens many guesses are right. Those at the end of the short form would reach into the long one."""
    ids = torch.randint(7, 10, (50, 27), generator=torch.Generator().manual_seed(0)).tolist()
    engine, plain = (engine_of(checkpoint, prompt_lookup=one) for one in (True, False))
    bias = {7: 50.0, 8: 50.0, 9: 50.0}
    for prompt in ids:
        assert answers(engine, [prompt], logit_bias=bias) == answers(plain, [prompt], logit_bias=bias)
    assert engine.stats.num_accepted_tokens > 100


def test_longer_contexts_than_the_models_own_are_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="is 257, but .* depend on the length of a sequence"):
        engine_of(checkpoint, max_model_len=257, allow_longer_context=True)
