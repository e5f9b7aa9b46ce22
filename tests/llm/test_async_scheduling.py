"""Steps that are launched before the last one is read: they change no answer, and the device always has work."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine, _goes_ahead
from raylens.llm.outputs import RequestOutput
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler import ChosenTokens, choose
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import PlaceholderRange, ProcessedPrompt
from tests.llm.answered import PROMPTS, Answered, add, answer, answered, steps
from tests.llm.deferred_device import DeferredDevice
from tests.llm.operations import noted

BYTES_PER_TOKEN = 2048
NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.0)
SETTINGS = {
    "greedy": GREEDY,
    "ends by itself": SamplingParams(max_tokens=40, temperature=0.0),
    "stop tokens": SamplingParams(max_tokens=40, temperature=1.0, seed=4, stop_token_ids=tuple(range(100, 160))),
    "stop string": SamplingParams(max_tokens=40, min_tokens=6, temperature=0.0, stop=("e",)),
    "a floor and bias": SamplingParams(max_tokens=30, temperature=0.0, min_tokens=9, logit_bias={2: 20.0}),
    "seeded": SamplingParams(max_tokens=24, temperature=0.9, seed=7, min_tokens=24),
    "seeded and cut": SamplingParams(max_tokens=24, temperature=1.2, top_p=0.8, top_k=40, min_p=0.01, seed=8),
    "several answers": SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=3),
    "no tokens": SamplingParams(max_tokens=0),
    "one token": SamplingParams(max_tokens=1, temperature=0.0),
    "allowed tokens": SamplingParams(max_tokens=20, temperature=1.0, seed=2, allowed_token_ids=(60, 70, 80, 90)),
}
"""A choice depends at most on how many tokens there are."""
BY_IDENTITY = {
    "penalties": SamplingParams(
        max_tokens=24,
        min_tokens=24,
        temperature=0.7,
        seed=9,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.2,
    ),
    "grammar": SamplingParams(
        max_tokens=30, temperature=0.0, structured_output=StructuredOutput(regex="([a-z]{2,9} ){9}")
    ),
    "bad words": SamplingParams(max_tokens=24, min_tokens=24, temperature=0.0, bad_words=("red circle", "a b")),
    "logprobs": SamplingParams(max_tokens=20, min_tokens=20, temperature=0.0, logprobs=3),
}
"""A choice depends on which tokens the earlier ones are, or the host is told more than the token."""
OTHERS = {
    "scored prompt": SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=2, ignore_eos=True),
    "cut by mass": SamplingParams(max_tokens=24, temperature=1.2, top_p=0.8, seed=8),
}
ALL = SETTINGS | BY_IDENTITY | OTHERS


def make_engine(shapes: str, *, is_ahead: bool, **own: Any) -> LLMEngine:
    defaults = {"kv_cache_bytes": 2**24, "max_num_seqs": 12, "prompt_lookup": False}
    return LLMEngine(EngineConfig(shapes, async_scheduling=is_ahead, **{**defaults, **own}))


def without_logprobs(answers: dict[str, Answered]) -> dict[str, Answered]:
    """Other chunks of a prompt give other last digits."""
    return {name: replace(own, logprobs="") for name, own in answers.items()}


@pytest.fixture(scope="module")
def plain(shapes: str) -> LLMEngine:
    return make_engine(shapes, is_ahead=False)


@pytest.fixture(scope="module")
def ahead(shapes: str) -> LLMEngine:
    return make_engine(shapes, is_ahead=True)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_prompts", [1, 5])
def test_answers_stay_the_same(plain: LLMEngine, ahead: LLMEngine, name: str, num_prompts: int) -> None:
    prompts = PROMPTS[:num_prompts]
    assert answer(ahead, prompts, ALL[name]) == answer(plain, prompts, ALL[name])


def test_these_answers_vary(plain: LLMEngine) -> None:
    """Else a token that is fed to the wrong row or too late would change none."""
    for params in (GREEDY, SETTINGS["seeded"]):
        token_ids = [own.token_ids for own in answer(plain, PROMPTS, params).values()]
        assert len({tuple(own) for own in token_ids}) == len(PROMPTS)
        assert sum(len(set(own)) > 4 for own in token_ids) >= len(PROMPTS) - 1


SMALL: dict[str, dict[str, Any]] = {
    "much room": {},
    "few tokens a step": {"max_num_batched_tokens": 13},
    "few blocks": {"block_size": 4, "kv_cache_bytes": 140 * BYTES_PER_TOKEN},
    "blocks of one": {"block_size": 1, "kv_cache_bytes": 140 * BYTES_PER_TOKEN},
}


@pytest.mark.long
@pytest.mark.parametrize("settings", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("kinds", [SETTINGS, ALL], ids=["by number", "all"])
def test_answers_in_a_mixed_batch_stay_the_same(
    shapes: str, plain: LLMEngine, settings: dict[str, Any], kinds: dict[str, SamplingParams]
) -> None:
    """They come one after another, and where blocks are few some are preempted while their tokens are pending."""
    engine = make_engine(shapes, is_ahead=True, **settings)
    expected: dict[str, Answered] = {}
    for index, (name, params) in enumerate(kinds.items()):
        add(plain, name, PROMPTS[index % len(PROMPTS)], params)
        expected |= answered(steps(plain))
    for _ in range(2):  # the second time their beginnings are cached
        collected = []
        for index, (name, params) in enumerate(kinds.items()):
            add(engine, name, PROMPTS[index % len(PROMPTS)], params)
            collected += engine.step()
        collected += list(steps(engine))
        assert without_logprobs(answered(iter(collected))) == without_logprobs(expected)
    assert (engine.stats.num_preemptions > 0) == ("block_size" in settings)


@pytest.mark.long
def test_aborted_neighbours_change_nothing(shapes: str, plain: LLMEngine) -> None:
    expected = answer(plain, PROMPTS, SETTINGS["seeded"])
    chance = random.Random(0)
    engine = make_engine(shapes, is_ahead=True, block_size=4, kv_cache_bytes=140 * BYTES_PER_TOKEN)
    for _ in range(5):
        collected: list[RequestOutput] = []
        for index, prompt in enumerate(PROMPTS):
            add(engine, str(index), prompt, SETTINGS["seeded"])
            add(engine, f"goes {index}", prompt, SETTINGS["seeded"])
        for index in chance.sample(range(5), 5):
            for _ in range(chance.randrange(4)):
                collected += engine.step()
            engine.abort(f"goes {index}")
            engine.check_integrity()
        collected += list(steps(engine))
        assert {name: own for name, own in answered(iter(collected)).items() if "goes" not in name} == expected


def test_a_request_may_come_again_while_its_aborted_one_is_in_flight(plain: LLMEngine, ahead: LLMEngine) -> None:
    expected = answer(plain, PROMPTS[:1], SETTINGS["seeded"])
    add(ahead, "other", PROMPTS[1], GREEDY)
    for _ in range(3):
        add(ahead, "0", PROMPTS[0], SETTINGS["seeded"])
        ahead.step()
        ahead.step()
        ahead.abort("0")
    add(ahead, "0", PROMPTS[0], SETTINGS["seeded"])
    outputs = list(steps(ahead))
    assert answered(one for one in outputs if one.request_id == "0") == expected


def test_the_last_abort_forgets_the_step_in_flight(ahead: LLMEngine) -> None:
    add(ahead, "r", PROMPTS[0], GREEDY)
    ahead.step()
    assert ahead._in_flight is not None
    assert not ahead.is_idle
    ahead.abort("r")
    assert ahead._in_flight is None
    assert ahead.is_idle
    assert ahead.stats.kv_cache_usage == 0


# How the host and the device take turns


def test_the_device_always_has_a_step_while_answers_go_on(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = {}
    for is_ahead in (True, False):
        engine = make_engine(shapes, is_ahead=is_ahead)
        with monkeypatch.context() as patch:
            device = DeferredDevice.under(engine, patch)
            answer(engine, PROMPTS, GREEDY)
        idle[is_ahead] = device.num_idle_launches
        launches = [index for index, event in enumerate(device.events) if event == "launch"]
        reads = [index for index, event in enumerate(device.events) if event == "read"]
        assert len(launches) == len(reads) == NUM_TOKENS
        is_launched_before = [launch < read for launch, read in zip(launches[1:], reads, strict=False)]
        assert is_launched_before == [is_ahead] * len(is_launched_before)
    assert idle == {True: 1, False: NUM_TOKENS}


def note_turns(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes what the host does, in order."""
    turns: list[str] = []
    monkeypatch.setattr(engine._runner, "run", noted(turns, "launch", engine._runner.run))
    monkeypatch.setattr("raylens.llm.step_in_flight.choose", noted(turns, "choose", choose))
    monkeypatch.setattr(ChosenTokens, "read", noted(turns, "read", ChosenTokens.read))
    return turns


@pytest.mark.parametrize("name", ["greedy", "seeded", *BY_IDENTITY])
def test_a_step_is_launched_before_the_last_one_is_read_and_its_tokens_are_chosen_behind_that(
    ahead: LLMEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("raylens.llm.late_masks._PATIENCE_SECONDS", 60)
    turns = note_turns(ahead, monkeypatch)
    params = ALL[name]
    add(ahead, "r", PROMPTS[0], replace(params, max_tokens=9, min_tokens=min(params.min_tokens or 0, 9)))
    assert sum(len(output.token_ids) for output in steps(ahead)) == 9
    assert turns == ["launch", "choose", *["launch", "read", "choose"] * 8, "read"]


def test_guessed_tokens_are_read_before_the_next_guess(
    shapes: str, plain: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(plain, PROMPTS[:2], GREEDY)
    engine = make_engine(shapes, is_ahead=True, prompt_lookup=True)
    turns = note_turns(engine, monkeypatch)
    assert answer(engine, PROMPTS[:2], GREEDY) == expected
    assert engine.stats.num_accepted_tokens > 0
    launches = [index for index, turn in enumerate(turns) if turn == "launch"]
    assert all(turns[index - 1] == "read" for index in launches[1:])


def test_a_choice_that_waits_for_its_step_is_told_at_once(ahead: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its token would come a step later for nothing."""
    monkeypatch.setattr("raylens.llm.sampling.truncation.NUCLEUS_PREFIX", 64)
    turns = note_turns(ahead, monkeypatch)
    add(ahead, "r", PROMPTS[0], OTHERS["cut by mass"])
    num_tokens = sum(len(output.token_ids) for output in steps(ahead))
    assert turns == ["launch", "choose", "read"] * num_tokens


def test_a_step_that_scores_a_prompt_is_told_at_once(ahead: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = note_turns(ahead, monkeypatch)
    add(ahead, "r", PROMPTS[0], OTHERS["scored prompt"])
    list(steps(ahead))
    assert turns == ["launch", "choose", "read", "launch", "choose", *["launch", "read", "choose"] * 4, "read"]


def test_a_device_never_has_more_than_two_steps_to_do(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what arrives behind a long prompt would wait for all of its chunks."""
    engine = make_engine(shapes, is_ahead=True, max_num_batched_tokens=12)
    device = DeferredDevice.under(engine, monkeypatch)
    add(engine, "long", list(range(10, 110)), SamplingParams(max_tokens=2, temperature=0.0))
    while engine.has_unfinished():
        engine.step()
        assert len(device.queue) <= 2 * 2  # the model and the sampler of each


@pytest.mark.long
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_device_that_comes_as_late_as_it_may_gives_the_same_answers(
    shapes: str, plain: LLMEngine, monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    """Ended and preempted sequences have rows in flight when their blocks belong to others."""
    engine = make_engine(shapes, is_ahead=True, block_size=block_size, kv_cache_bytes=140 * BYTES_PER_TOKEN)
    expected: dict[str, Answered] = {}
    for index, name in enumerate(SETTINGS):
        add(plain, name, PROMPTS[index % 5], SETTINGS[name])
        expected |= answered(steps(plain))
    DeferredDevice.under(engine, monkeypatch)
    for _ in range(3):
        collected: list[RequestOutput] = []
        for index, name in enumerate(SETTINGS):
            add(engine, name, PROMPTS[index % 5], SETTINGS[name])
            add(engine, f"goes {name}", PROMPTS[index % 5], SETTINGS[name])
            collected += engine.step()
            if index % 2:
                engine.abort(f"goes {name}")
        collected += list(steps(engine))
        assert {name: own for name, own in answered(iter(collected)).items() if "goes" not in name} == expected
    assert engine.stats.num_preemptions > 0


# Blocks and their names


@pytest.mark.long
def test_what_was_decoded_ahead_is_found_by_the_next_turn(shapes: str, plain: LLMEngine) -> None:
    engine = make_engine(shapes, is_ahead=True, block_size=4)
    (own,) = answer(engine, PROMPTS[:1], GREEDY).values()
    for cut in range(1, NUM_TOKENS, 3):
        longer = [*PROMPTS[0], *own.token_ids[:cut], 77]
        add(engine, "next", longer, GREEDY)
        outputs = list(steps(engine))
        assert outputs[0].num_cached_tokens == (len(longer) - 1) // 4 * 4
        add(plain, "next", longer, GREEDY)
        assert answered(iter(outputs)) == answered(steps(plain))


def test_no_block_has_a_name_that_a_dropped_row_writes_to(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends at every place of a block. The row behind the end is launched, and its block is nobody's by then."""
    engine = make_engine(shapes, is_ahead=True, block_size=4)
    (free,) = (own.token_ids for own in answer(engine, PROMPTS[:1], GREEDY).values())
    manager, builder = engine._block_manager, engine._runner._builder
    build, written = builder.build, list[int]()

    def noting(*args: Any) -> Any:
        step = build(*args)
        written[:] = step.slot_mapping.tolist()
        return step

    monkeypatch.setattr(builder, "build", noting)
    places = set()
    # As the greedy answer, whose end tokens are banned; a stop token would be, too.
    unbanned = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logit_bias={2: -100.0})
    for length in (place + 1 for place in range(1, NUM_TOKENS) if free.index(free[place]) == place):
        params = replace(unbanned, stop_token_ids=(free[length - 1],))
        prompt = ProcessedPrompt(PROMPTS[0], [], [])
        engine.add_request("r", prompt, [], params, cache_salt=f"no name from before {length}")
        last = list(steps(engine))[-1]
        assert (last.num_output_tokens, last.finish_reason) == (length, "stop")
        (slot,) = written
        places.add(slot % 4)
        assert slot % 4 == (len(PROMPTS[0]) + length - 1) % 4, "the last row is the one behind the end"
        assert manager._hash_of[slot // 4] is None
    assert 3 in places, "the row fills a block"


# Failures


def test_a_launch_that_fails_leaves_the_step_before_it(ahead: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token in flight comes, then the failure; a request that the step did not touch goes on."""
    add(ahead, "bad", PROMPTS[0], GREEDY)
    ahead.step()
    with monkeypatch.context() as patch:
        patch.setattr(ahead._runner, "run", lambda *_: 1 / 0)
        token, failure = ahead.step()
    assert (token.request_id, len(token.token_ids), token.finish_reason) == ("bad", 1, None)
    assert (failure.request_id, failure.token_ids, failure.finish_reason) == ("bad", [], "error")
    assert not ahead.has_unfinished()
    add(ahead, "good", PROMPTS[0], GREEDY)
    assert list(steps(ahead))[-1].finish_reason == "length"


def test_a_reading_that_fails_ends_the_requests_of_its_step(ahead: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(ahead, "bad", PROMPTS[0], GREEDY)
    ahead.step()
    add(ahead, "good", PROMPTS[1], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr("raylens.llm.sampling.sampler.ChosenTokens.read", lambda _: 1 / 0)
        (failure,) = ahead.step()
    assert (failure.request_id, failure.finish_reason) == ("bad", "error")
    assert {one.request_id for one in steps(ahead)} == {"good"}


def test_nan_ends_its_own_request_although_its_next_row_is_launched(plain: LLMEngine, ahead: LLMEngine) -> None:
    prompt = ProcessedPrompt([1, 3, 3, 50], [PlaceholderRange(1, 2)], ["h"])
    ahead.add_request("bad", prompt, [torch.full((2, 192), torch.nan)], GREEDY)
    add(ahead, "0", PROMPTS[0], GREEDY)
    outputs = list(steps(ahead))
    assert [one.finish_reason for one in outputs if one.request_id == "bad"] == ["error"]
    expected = answer(plain, PROMPTS[:1], GREEDY)
    assert answered(one for one in outputs if one.request_id == "0") == expected


# Where it is on


class AnyGroup:
    """Of several ranks."""


@pytest.mark.parametrize(
    ("setting", "device", "is_divided", "expected"),
    [
        (None, "cpu", False, False),
        (None, "cuda", False, True),
        (None, "cuda:1", False, True),
        (None, "cuda", True, False),
        (False, "cuda", False, False),
        (False, "cuda", True, False),
        (True, "cpu", False, True),
    ],
)
def test_it_is_on_where_one_process_computes_on_a_gpu(
    setting: bool | None, device: str, is_divided: bool, expected: bool
) -> None:
    group: Any = AnyGroup() if is_divided else None
    assert _goes_ahead(EngineConfig("model", device=device, async_scheduling=setting), group) is expected


def test_a_divided_model_cannot_go_ahead(shapes: str) -> None:
    group: Any = AnyGroup()
    with pytest.raises(ValueError, match="async_scheduling: rank 0 sends each token .* null or false"):
        LLMEngine(EngineConfig(shapes, async_scheduling=True), group)
