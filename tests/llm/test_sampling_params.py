"""Every setting has a limit, and what is beyond it is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest

from raylens.llm.sampling.bounds import MAX_BAD_WORDS, MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.structured_output import MAX_CHOICES, MAX_GRAMMAR_CHARS, StructuredOutput
from raylens.preprocess.schema import InvalidRequestError

NAN = float("nan")
INF = float("inf")

BEYOND: list[tuple[str, Any]] = [
    ("max_tokens", -1),
    ("max_tokens", -5),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", NAN),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", INF),
    ("repetition_penalty", NAN),
    ("presence_penalty", -2.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", NAN),
    ("logit_bias", {1: -100.5}),
    ("logit_bias", {1: 0.0, 2: INF}),
    ("logit_bias", dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 0.0)),
    ("allowed_token_ids", ()),
    ("bad_words", ("x",) * (MAX_BAD_WORDS + 1)),
    ("bad_words", ("x" * 257,)),
    ("bad_words", (" ",)),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("stop", ("",)),
    ("stop", ("x" * 257,)),
    ("stop", ("x",) * 17),
    ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + 1))),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("n", 0),
    ("n", 129),
]


@pytest.mark.parametrize(("field", "value"), BEYOND)
def test_bad_parameters_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field}: must be .*, got .+") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_min_tokens_do_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens: must be at most max_tokens, got 3"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_structured_output_is_not_cut_down_to_some_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="allowed_token_ids: must be absent where structured_output is set"):
        SamplingParams(allowed_token_ids=(5,), structured_output=StructuredOutput(json_object=True))


def test_structured_output_has_an_end() -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos: must be false where structured_output is set, got True"):
        SamplingParams(ignore_eos=True, structured_output=StructuredOutput(json_object=True))


def test_limits_themselves_are_allowed() -> None:
    SamplingParams(
        max_tokens=1,
        min_tokens=1,
        temperature=2.0,
        top_p=1.0,
        min_p=1.0,
        repetition_penalty=100.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={0: -100.0, 1: 100},
        seed=-(2**63),
        logprobs=20,
        prompt_logprobs=0,
        n=128,
    )


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: StructuredOutput(), "structured_output"),
        (lambda: StructuredOutput(regex="a", json_object=True), "structured_output"),
        (lambda: StructuredOutput(json_schema='{"type": '), "json_schema"),
        (lambda: StructuredOutput(json_schema="[1]"), "json_schema"),
        (lambda: StructuredOutput(json_schema={"enum": [object()]}), "json_schema"),
        (lambda: StructuredOutput(json_schema="[" * 100_000), "json_schema"),
        (lambda: StructuredOutput(choice=()), "choice"),
        (lambda: StructuredOutput(choice=("a", "")), "choice"),
        (lambda: StructuredOutput(choice=("a",) * (MAX_CHOICES + 1)), "choice"),
        (lambda: StructuredOutput(regex="a" * (MAX_GRAMMAR_CHARS + 1)), "regex"),
    ],
)
def test_bad_forms_name_the_field(make: Callable[[], StructuredOutput], field: str) -> None:
    with pytest.raises(InvalidRequestError, match="must .*got ") as caught:
        make()
    assert caught.value.field == field
