"""Guessed tokens change no answer: whatever is guessed, greedily, with seeds, with penalties, and where answers end."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.prompt_lookup import PromptLookup
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler import ChosenTokens, choose
from raylens.preprocess.schema import ProcessedPrompt
from tests.llm.answered import PROMPTS, add, answer, steps

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
SETTINGS = {
    "greedy": GREEDY,
    "ends by itself": SamplingParams(max_tokens=40, temperature=0.0),
    "seeded": SamplingParams(max_tokens=40, temperature=0.9, seed=7, ignore_eos=True),
    "seeded and cut": SamplingParams(max_tokens=40, temperature=1.2, top_p=0.8, top_k=40, min_p=0.01, seed=8),
    "penalties": SamplingParams(
        max_tokens=40, temperature=0.7, seed=9, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.2
    ),
    "bias and a floor": SamplingParams(max_tokens=40, temperature=0.0, min_tokens=9, logit_bias={2: 20.0}),
    "stop string": SamplingParams(max_tokens=40, temperature=0.0, stop=("e",), ignore_eos=True),
    "several answers": SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=3),
    "logprobs": SamplingParams(max_tokens=20, temperature=0.0, logprobs=3, ignore_eos=True),
}


def make_engine(shapes: str, **own: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(shapes, **{"kv_cache_bytes": 2**24, "max_num_seqs": 12, **own}))


@pytest.fixture(scope="module")
def plain(shapes: str) -> LLMEngine:
    return make_engine(shapes, prompt_lookup=False)


@pytest.fixture(scope="module")
def guessing(shapes: str) -> LLMEngine:
    return make_engine(shapes, prompt_lookup=True)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("num_prompts", [1, 5])
def test_answers_stay_the_same(plain: LLMEngine, guessing: LLMEngine, name: str, num_prompts: int) -> None:
    prompts = PROMPTS[:num_prompts]
    assert answer(guessing, prompts, SETTINGS[name]) == answer(plain, prompts, SETTINGS[name])


def test_fewer_steps_answer_a_text_that_repeats_itself(plain: LLMEngine, guessing: LLMEngine) -> None:
    before = [plain.stats, guessing.stats]
    answer(plain, PROMPTS[:1], GREEDY)
    answer(guessing, PROMPTS[:1], GREEDY)
    num_steps = [engine.stats.num_steps - own.num_steps for engine, own in zip([plain, guessing], before, strict=True)]
    num_accepted = guessing.stats.num_accepted_tokens - before[1].num_accepted_tokens
    assert num_accepted > 0
    assert num_steps[1] == num_steps[0] - num_accepted


class Prophet(PromptLookup):
    """Guesses what the answer will be, but for wrong tokens at some places."""

    answers: list[list[int]]
    wrong: set[int]

    def guess(self, max_tokens: int) -> list[int]:
        token_ids = self._token_ids
        whole = next(own for own in self.answers if own[: len(token_ids)] == token_ids)
        coming = range(len(token_ids), min(len(token_ids) + max_tokens, len(whole)))
        return [whole[position] ^ (position in self.wrong) for position in coming]


@pytest.mark.long
@pytest.mark.parametrize("name", ["greedy", "seeded", "stop string", "bias and a floor"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_any_guesses_change_no_answer(
    shapes: str, plain: LLMEngine, monkeypatch: pytest.MonkeyPatch, name: str, block_size: int
) -> None:
    expected = answer(plain, PROMPTS, SETTINGS[name])
    monkeypatch.setattr("raylens.llm.engine.PromptLookup", Prophet)
    engine = make_engine(shapes, prompt_lookup=True, block_size=block_size)
    # What comes after the answer's end is guessed, too.
    Prophet.answers = [
        [*prompt, *own.token_ids, *([5] * 8)] for prompt, own in zip(PROMPTS, expected.values(), strict=True)
    ]

    @settings(max_examples=8, deadline=None)
    @given(st.sets(st.integers(0, 110), max_size=60), st.integers(1, 5))
    def check(wrong: set[int], num_prompts: int) -> None:
        Prophet.wrong = wrong
        got = answer(engine, PROMPTS[:num_prompts], SETTINGS[name])
        assert got == dict(list(expected.items())[:num_prompts])
        assert engine.stats.kv_cache_usage == 0

    check()
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def test_the_next_turn_finds_what_was_guessed(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix cache holds the same with guesses and without them."""
    cached = []
    for prompt_lookup in (False, True):
        engine = make_engine(shapes, prompt_lookup=prompt_lookup, block_size=4)
        first = answer(engine, PROMPTS[:1], GREEDY)["0.0"].token_ids
        engine.add_request("next", ProcessedPrompt([*PROMPTS[0], *first, 60, 61], [], []), [], GREEDY)
        outputs = [output for _ in range(3) for output in engine.step()]
        cached.append(outputs[0].num_cached_tokens)
    assert cached[0] == cached[1] > len(PROMPTS[0])


def test_wrong_guesses_preempt_nobody(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take free blocks only: as many sequences are preempted as without guesses."""
    # Not enough for both answers, of 61 and 70 tokens.
    settings = {"block_size": 4, "kv_cache_bytes": 28 * 4 * 2048, "max_model_len": 70}
    plain = make_engine(shapes, prompt_lookup=False, **settings)
    expected = answer(plain, PROMPTS[:2], GREEDY)
    monkeypatch.setattr("raylens.llm.engine.PromptLookup", Prophet)
    Prophet.answers = [
        [*prompt, *own.token_ids, *([5] * 8)] for prompt, own in zip(PROMPTS, expected.values(), strict=False)
    ]
    Prophet.wrong = set(range(200))
    guessing = make_engine(shapes, prompt_lookup=True, **settings)
    assert answer(guessing, PROMPTS[:2], GREEDY) == expected
    assert guessing.stats.num_draft_tokens > 0 == guessing.stats.num_accepted_tokens
    assert guessing.stats.num_preemptions == plain.stats.num_preemptions > 0


def test_an_answer_ends_though_the_check_of_guesses_fails(
    shapes: str, plain: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of another answer's guesses, in the same step."""
    monkeypatch.setattr("raylens.llm.engine.PromptLookup", Prophet)
    told = answer(plain, PROMPTS[:2], GREEDY).values()
    Prophet.answers = [[*prompt, *own.token_ids] for prompt, own in zip(PROMPTS, told, strict=False)]
    Prophet.wrong = set()
    calls = iter(range(3))

    def fails(*args: Any) -> ChosenTokens:
        if next(calls) == 2:  # the choices before are those of the prompts and of the tokens after them
            raise RuntimeError("this choice fails")
        return choose(*args)

    monkeypatch.setattr("raylens.llm.step_in_flight.choose", fails)
    engine = make_engine(shapes, prompt_lookup=True)
    add(engine, "guessed", PROMPTS[0], GREEDY)
    add(engine, "short", PROMPTS[1], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    reasons = {output.request_id: output.finish_reason for output in steps(engine)}
    assert reasons == {"guessed": "error", "short": "length"}


TOKENS = st.lists(st.integers(0, 3), max_size=60)


@given(TOKENS, TOKENS, st.integers(1, 10))
def test_a_guess_goes_on_as_the_text_did(prompt: list[int], answer: list[int], max_tokens: int) -> None:
    token_ids = list(prompt)
    lookup = PromptLookup(token_ids, vocab_size=3)
    for token_id in answer:
        guessed = lookup.guess(max_tokens)
        end = len(token_ids)
        found = next((at for at in range(end - 1, 2, -1) if token_ids[at - 3 : at] == token_ids[-3:]), None)
        expected: list[int] = []
        while found is not None and len(expected) < max_tokens:
            expected.append([*token_ids, *expected][found + len(expected)])
        if 3 in expected:  # outside the vocabulary
            del expected[expected.index(3) :]
        assert guessed == expected[: len(guessed)]
        assert len(guessed) == min(2, len(expected))
        token_ids.append(token_id)


def test_right_guesses_grow_and_wrong_ones_become_rare() -> None:
    token_ids = [1, 2, 3] * 10
    lookup = PromptLookup(token_ids, vocab_size=10)
    lengths = []
    for _ in range(4):
        lengths.append(len(lookup.guess(100)))
        lookup.learn(lengths[-1], lengths[-1])
    assert lengths == [2, 4, 7, 7]
    lookup.learn(7, 3)
    assert len(lookup.guess(100)) == 3
    num_guesses = 0
    for _ in range(300):
        if guessed := lookup.guess(100):
            num_guesses += 1
            lookup.learn(len(guessed), 0)
        token_ids.append(token_ids[-3])
    assert 5 < num_guesses < 20
