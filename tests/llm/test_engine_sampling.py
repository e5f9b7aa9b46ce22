"""Sampling settings as the engine lives by them: forms of answers, stop tokens, the model's own defaults."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.outputs import RequestOutput
from raylens.llm.sampling.logprobs import TokenLogprobs
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import InvalidRequestError, ProcessedPrompt

PROMPT = ProcessedPrompt([1, 50, 51, 52], [], [])
DEFAULTS = SamplingParams()
COLOUR = StructuredOutput(
    json_schema={
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def engine(shapes: str) -> Iterator[LLMEngine]:
    made = LLMEngine(EngineConfig(shapes, max_num_seqs=8, max_model_len=128))
    yield made
    made.check_integrity()


def ask(engine: LLMEngine, **requests: SamplingParams) -> dict[str, list[RequestOutput]]:
    for name, params in requests.items():
        engine.add_request(name, PROMPT, [], params)
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in requests}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def text(engine: LLMEngine, outputs: list[RequestOutput], params: SamplingParams = DEFAULTS) -> str:
    detokenizer = engine.make_detokenizer(params, PROMPT)
    pieces = [
        detokenizer.append(output.token_ids[:-1] if output.has_stop_token else output.token_ids) for output in outputs
    ]
    return "".join(pieces) + ("" if detokenizer.stopped else detokenizer.flush())


def test_an_answer_has_its_form_and_ends_with_it(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=1, structured_output=COLOUR)
    plain = SamplingParams(max_tokens=5, ignore_eos=True)
    outputs = ask(engine, a=params, plain=plain, longer=SamplingParams(min_tokens=90, structured_output=COLOUR))
    for name in ("a", "longer"):
        assert json.loads(text(engine, outputs[name]))["colour"] in ("red", "blue")
        assert outputs[name][-1].finish_reason == "stop"
        assert outputs[name][-1].num_output_tokens < 90
        assert outputs[name][-1].token_ids != [2]  # no step for an end token that was certain
    assert tokens(outputs["plain"]) == tokens(ask(engine, plain=plain)["plain"])


def test_a_form_that_cannot_be_had_is_refused_and_leaves_nothing(engine: LLMEngine) -> None:
    for params, field in [
        (SamplingParams(structured_output=StructuredOutput(regex="(")), "regex"),
        (SamplingParams(logit_bias={10**6: 1.0}), "logit_bias"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            engine.add_request("bad", PROMPT, [], params)
        assert caught.value.field == field
    assert not engine.has_unfinished()
    assert ask(engine, bad=SamplingParams(max_tokens=1))["bad"][-1].finish_reason is not None


def test_a_stop_token_ends_the_answer_and_is_no_part_of_its_text(engine: LLMEngine) -> None:
    free = ask(engine, a=SamplingParams(max_tokens=6, ignore_eos=True))["a"]
    stop = tokens(free)[3]
    first = tokens(free).index(stop)
    stopped = ask(engine, a=SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=(stop,)))["a"]
    assert stopped[-1].finish_reason == "stop"
    assert stopped[-1].num_output_tokens == first + 1
    assert [output.has_stop_token for output in stopped] == [False] * first + [True]
    assert text(engine, free).startswith(text(engine, stopped))
    assert len(text(engine, stopped)) < len(text(engine, free))


def test_a_stop_string_ends_the_answer_where_its_text_has_it(engine: LLMEngine) -> None:
    free = ask(engine, a=SamplingParams(max_tokens=12, ignore_eos=True))["a"]
    stop = text(engine, free)[4:7]
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop=(stop,))
    stopped = ask(engine, a=params)["a"]
    assert stopped[-1].finish_reason == "stop"
    assert not stopped[-1].has_stop_token
    assert len(stopped) < len(free)
    assert text(engine, stopped, params) == text(engine, free).split(stop)[0]


@pytest.mark.long
def test_the_models_own_repetition_penalty_holds_unless_a_request_sets_another(shapes: str, tmp_path: Path) -> None:
    folder = str(shutil.copytree(shapes, tmp_path / "penalized"))
    path = Path(folder) / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 3.0}))
    plain, penalized = (LLMEngine(EngineConfig(model, max_num_seqs=2, max_model_len=128)) for model in (shapes, folder))
    default = SamplingParams(max_tokens=30, ignore_eos=True)
    own = SamplingParams(max_tokens=30, ignore_eos=True, repetition_penalty=3.0)
    off = SamplingParams(max_tokens=30, ignore_eos=True, repetition_penalty=1.0)
    assert tokens(ask(penalized, a=default)["a"]) == tokens(ask(plain, a=own)["a"])
    assert tokens(ask(plain, a=own)["a"]) != tokens(ask(plain, a=default)["a"])
    assert tokens(ask(penalized, a=off)["a"]) == tokens(ask(plain, a=default)["a"])


LONG_PROMPT = ProcessedPrompt([1, *range(20, 60)], [], [])


@pytest.fixture(scope="module")
def prompt_logprobs(shapes: str) -> torch.Tensor:
    """(num_prompt_tokens - 1, vocab): of the token behind each, as the whole model has them."""
    model = LlavaForConditionalGeneration.from_pretrained(shapes, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([LONG_PROMPT.prompt_token_ids])).logits
    expected: torch.Tensor = logits[0, :-1].log_softmax(dim=-1)
    return expected


def check_prompt_logprobs(told: Sequence[TokenLogprobs], expected: torch.Tensor, num_top: int) -> None:
    token_ids = LONG_PROMPT.prompt_token_ids[1:]
    assert [one.token_id for one in told] == token_ids
    for one, row in zip(told, expected, strict=True):
        assert one.logprob == pytest.approx(row[one.token_id].item(), abs=1e-4)
        above, at_least = ((row > row[one.token_id] + slack).sum() for slack in (1e-4, -1e-4))
        assert above < one.rank <= at_least, "tokens whose log-probabilities differ by rounding have any order"
        assert [value for _, value in one.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}, {"kv_cache_bytes": 2**18}])
def test_prompt_logprobs_are_those_of_the_whole_model(
    shapes: str, prompt_logprobs: torch.Tensor, settings: dict[str, Any]
) -> None:
    """In chunks, beside others, after preemption, and with the prompt in the prefix cache already."""
    engine = LLMEngine(EngineConfig(shapes, **{"block_size": 4, "max_num_seqs": 8, "max_model_len": 64, **settings}))
    for _ in range(2):
        for name, num_top in (("a", 0), ("b", 3), ("c", None)):
            params = SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=num_top, n=2)
            engine.add_request(name, LONG_PROMPT, [], params)
        first: dict[tuple[str, int], RequestOutput] = {}
        while engine.has_unfinished():
            for output in engine.step():
                if (key := (output.request_id, output.index)) in first:
                    assert not output.prompt_logprobs
                first.setdefault(key, output)
        check_prompt_logprobs(first["a", 0].prompt_logprobs, prompt_logprobs, 0)
        check_prompt_logprobs(first["b", 0].prompt_logprobs, prompt_logprobs, 3)
        for key in (("c", 0), ("a", 1), ("b", 1), ("c", 1)):
            assert not first[key].prompt_logprobs
    engine.check_integrity()
    assert (engine.stats.num_preemptions > 0) == ("kv_cache_bytes" in settings)


def test_logprobs_come_with_their_tokens(engine: LLMEngine) -> None:
    outputs = ask(engine, a=SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True), b=SamplingParams(max_tokens=3))
    for output in outputs["a"]:
        (one,) = output.logprobs
        assert [one.token_id] == output.token_ids
        assert one.top[0] == (one.token_id, one.logprob)
        assert len(one.top) == 2
    assert not any(output.logprobs for output in outputs["b"])


def test_answers_with_one_seed_differ_and_come_again(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=5, n=3, ignore_eos=True)

    def answers(**neighbours: SamplingParams) -> list[list[int]]:
        outputs = ask(engine, a=params, **neighbours)["a"]
        return [[token for output in outputs if output.index == i for token in output.token_ids] for i in range(3)]

    alone = answers()
    assert len({tuple(tokens) for tokens in alone}) == 3
    busy = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    assert answers(b=busy, c=SamplingParams(max_tokens=3), d=busy) == alone
