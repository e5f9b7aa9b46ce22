"""A mask that takes long keeps nobody waiting but the answer that it is for, and changes no token."""

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from raylens.llm.answers import AnswerState
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.late_masks import LateMasks, _matchers
from raylens.llm.outputs import RequestOutput
from raylens.llm.sampling.grammar import GrammarMatcher
from raylens.llm.sampling.grammar_check import GrammarError
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.llm.sequence import FinishReason, Sequence
from raylens.preprocess.schema import InvalidRequestError, ProcessedPrompt

FORM = StructuredOutput(regex="([a-z]{2,9} ){30}")
FORMED = SamplingParams(max_tokens=40, temperature=0.0, structured_output=FORM)
FREE = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["", "ahead"])
def engine(shapes: str, request: pytest.FixtureRequest) -> LLMEngine:
    # Two answers of 40 tokens leave no room for a third: what waits for a mask is preempted, too.
    return LLMEngine(
        EngineConfig(
            model=shapes,
            block_size=4,
            kv_cache_bytes=28 * 4 * 2048,
            max_num_seqs=4,
            prompt_lookup=False,
            async_scheduling=request.param,
        )
    )


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is closed no mask is computed."""
    opened = threading.Event()
    replace_mask(monkeypatch, lambda: opened.wait(60))
    yield opened
    opened.set()


def replace_mask(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    compute = GrammarMatcher._compute_mask

    def computed(self: GrammarMatcher) -> None:
        before()
        compute(self)

    monkeypatch.setattr(GrammarMatcher, "_compute_mask", computed)


def add(engine: LLMEngine, request_id: str, params: SamplingParams) -> None:
    engine.add_request(request_id, ProcessedPrompt([1, *range(40, 50 + len(request_id))], [], []), [], params)


def steps(engine: LLMEngine, until: Callable[[], bool] = lambda: False) -> dict[str, list[RequestOutput]]:
    """The outputs of each request until nothing is left to do."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished() and not until():
        assert not engine.is_idle
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def waiting_answer(engine: LLMEngine) -> tuple[Sequence, AnswerState]:
    """Of a sequence that is computed as far as it goes, and whose grammar's mask is not there."""
    add(engine, "formed", FORMED)
    (answers,) = (request.answers for request in engine._answers.requests.values())
    ((sequence, answer),) = answers.items()
    sequence.num_computed_tokens = len(sequence.token_ids)
    return sequence, answer


def test_logits_are_kept_as_they_were(engine: LLMEngine, gate: threading.Event) -> None:
    late, logits = LateMasks(), torch.arange(8.0).view(1, 8)
    waiting = waiting_answer(engine)
    assert late.exchange([waiting], logits) == ([], None)
    logits.zero_()  # as the next step's are written to the same place on a GPU
    assert late.exchange([], None) == ([], None)
    gate.set()
    GrammarMatcher.wait_for(_matchers([waiting[1]]), 60, for_all=True)
    sampling, kept = late.exchange([], None)
    assert sampling == [waiting]
    assert kept is not None
    assert kept.tolist() == [list(range(8))]
    assert not late.sequences
    engine.abort("formed")


def test_logits_of_what_is_computed_again_are_dropped(engine: LLMEngine, gate: threading.Event) -> None:
    late = LateMasks()
    sequence, answer = waiting_answer(engine)
    late.exchange([(sequence, answer)], torch.zeros(1, 8))
    late.forget_gone()
    assert late.sequences == [sequence]
    sequence.num_computed_tokens = 0  # preempted
    late.forget_gone()
    assert not late.sequences
    engine.abort("formed")


def test_others_go_on_and_the_answer_is_the_same(engine: LLMEngine, gate: threading.Event) -> None:
    gate.set()
    add(engine, "formed", FORMED)
    expected = tokens(steps(engine)["formed"])
    gate.clear()
    add(engine, "formed", FORMED)
    add(engine, "free", FREE)
    seen = steps(engine, until=lambda: engine.stats.num_running == 1)
    assert set(seen) == {"free"}
    assert len(tokens(seen["free"])) == 40
    gate.set()
    assert tokens(steps(engine)["formed"]) == expected


def test_masks_of_any_slowness_change_no_token(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def everyone() -> dict[str, list[int]]:
        for name in ("a", "bb", "ccc", "dddd"):
            add(engine, name, FREE if name == "bb" else FORMED)
        return {name: tokens(outputs) for name, outputs in steps(engine).items()}

    expected = everyone()
    before = engine.stats.num_preemptions
    chance = random.Random(1)
    replace_mask(monkeypatch, lambda: time.sleep(chance.choice([0, 0, 0.012])))
    for _ in range(20):  # whether there is room for all depends on who waits when
        assert everyone() == expected
        if engine.stats.num_preemptions > before:
            return
    pytest.fail("no sequence was preempted")


def test_one_that_is_given_up_leaves_nothing(engine: LLMEngine, gate: threading.Event) -> None:
    add(engine, "formed", FORMED)
    assert engine.step() == []
    assert engine.step() == []
    engine.abort("formed")
    assert not engine.has_unfinished()
    assert engine.stats.kv_cache_usage == 0
    assert engine.step() == []
    assert engine.is_idle
    gate.set()


def test_a_grammar_that_fails_on_the_way_is_the_requests_own_fault(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter(range(1000))

    def fail_once() -> None:
        if next(counts) == 3:
            raise GrammarError("Too many items")

    add(engine, "free", FREE)
    replace_mask(monkeypatch, fail_once)
    add(engine, "formed", FORMED)
    outputs = steps(engine)
    assert len(tokens(outputs["free"])) == 40
    last = outputs["formed"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, InvalidRequestError)
    assert str(last.error) == "regex: must be one that can be followed to its end, got: Too many items"
