"""Layers with a recurrent state: greedy tokens equal those of `generate` in any schedule, with any guesses."""

from pathlib import Path

import pytest
import torch

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from tests.llm.answered import answer
from tests.llm.random_schedules import Prophet, check_schedules, foresee
from tests.model_coverage.language_requests import SPECIAL, Request, answers, request, save_tokenizer, small_model

NUM_TOKENS = 40
BIAS = dict.fromkeys(SPECIAL, -100.0)
CACHE_BYTES = {"inkling2": 2**17, "inkling_mm_model": 2**17}
"""Of models with attention in all layers: as many positions as others have in 2**16 bytes."""


def conversations(model_type: str, folder: Path) -> list[Request]:
    """Three pictures; about each a question, a longer one that begins with it, and a second turn after the answer."""
    model = small_model(model_type)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    generator = torch.Generator().manual_seed(1)
    asked: list[Request] = []
    with torch.inference_mode():
        for seed in range(3):
            text = torch.randint(200, 380, (50,), generator=generator).tolist()
            short = request(model, seed, 0, after=text[:20], num_tokens=NUM_TOKENS)
            told = [*text[:20], *short.expected[:-1], *text[:7]]
            asked.append(short)
            asked.append(request(model, seed, 0, after=text, num_tokens=NUM_TOKENS))
            asked.append(request(model, seed, 0, after=told, num_tokens=NUM_TOKENS))
    assert len({tuple(one.expected) for one in asked}) == len(asked)
    return asked


@pytest.mark.parametrize(
    ("model_type", "num_schedules"),
    [
        ("qwen3_5", 20),
        ("lfm3_vl", 20),
        pytest.param("inkling_mm_model", 40, marks=pytest.mark.slow),
        pytest.param("inkling2", 40, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 300, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", 300, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "ahead"])
def test_any_schedule_gives_the_tokens_of_generate(
    model_type: str, num_schedules: int, is_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sequences are preempted, some begin at a snapshot of another one's state, some guesses are wrong."""
    requests = conversations(model_type, tmp_path)
    foresee(monkeypatch, requests)
    config = EngineConfig(
        str(tmp_path),
        block_size=4,
        kv_cache_bytes=CACHE_BYTES.get(model_type, 2**16),
        max_num_seqs=5,
        max_num_batched_tokens=24,
        max_decode_slowdown=None,  # else the number of preemptions depends on the machine
        async_scheduling=is_ahead,
        prompt_lookup=True,
    )
    engine = LLMEngine(config)
    check_schedules(engine, requests, num_schedules, monkeypatch, BIAS)


def test_layers_that_take_no_slots_guess_in_several_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylens.llm.states.recurrent_states.takes_slots", lambda mixer, library: False)
    requests = conversations("qwen3_5", tmp_path)
    foresee(monkeypatch, requests)
    for prompt_lookup in (None, True):
        engine = LLMEngine(EngineConfig(str(tmp_path), block_size=4, kv_cache_bytes=2**20, prompt_lookup=prompt_lookup))
        for one, found in zip(requests[:3], answers(engine, requests[:3]), strict=True):
            assert found == one.expected[: len(found)]
        assert (engine.stats.num_draft_tokens > 0) == bool(prompt_lookup), "by default such layers do not guess"
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


@pytest.mark.parametrize("model_type", ["qwen3_5", "lfm3_vl", "nemotron_h_omni"])
def test_guesses_change_no_sampled_answer(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model(model_type).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    params, found = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=5, ignore_eos=True), []
    prompts = [list(range(200, 220)), list(range(300, 250, -1))]
    for prompt_lookup in (False, None):  # the default guesses
        engine = LLMEngine(EngineConfig(str(tmp_path), kv_cache_bytes=2**20, prompt_lookup=prompt_lookup))
        found.append(answer(engine, prompts, params))
        monkeypatch.setattr("raylens.llm.engine.PromptLookup", Prophet)
        Prophet.wholes = [[*prompts[index], *found[0][f"{index}.0"].token_ids] for index in range(2)]
    assert found[0] == found[1]
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


@pytest.mark.parametrize("model_type", ["qwen3_5", "lfm3_vl"])
@pytest.mark.parametrize("prompt_lookup", [False, True])
def test_the_next_turn_begins_at_a_snapshot_of_the_answer(
    model_type: str, prompt_lookup: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, _, next_turn = conversations(model_type, tmp_path)[:3]
    foresee(monkeypatch, [question, next_turn])
    engine = LLMEngine(EngineConfig(str(tmp_path), block_size=4, kv_cache_bytes=2**20, prompt_lookup=prompt_lookup))
    for name, one, num_cached in (("first", question, 0), ("again", question, 32), ("next", next_turn, 64)):
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logit_bias=BIAS)
        engine.add_request(name, one.prompt, one.embeddings, params)
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        assert [token for output in outputs for token in output.token_ids] == one.expected
        assert outputs[0].num_cached_tokens == num_cached, name
