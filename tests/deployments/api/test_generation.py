"""Fields of generation under the names of several servers."""

from typing import Any

import pytest
from pydantic import ValidationError

from raylens.deployments.api.chat import ChatCompletionRequest
from raylens.llm.sampling.structured_output import StructuredOutput


def chat(**fields: Any) -> ChatCompletionRequest:
    messages = fields.pop("messages", [{"role": "user", "content": "Hi"}])
    return ChatCompletionRequest.model_validate({"messages": messages, **fields})


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_json": {"type": "object"}}, StructuredOutput(json_schema={"type": "object"})),
        ({"guided_regex": "a+"}, StructuredOutput(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutput(choice=("a", "b"))),
        ({"guided_grammar": "start: /a/"}, StructuredOutput(grammar="start: /a/")),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(json_object=True)),
        ({"structured_outputs": {"choice": ["a"]}}, StructuredOutput(choice=("a",))),
    ],
)
def test_forms_have_the_names_of_vllm(fields: dict[str, Any], form: StructuredOutput) -> None:
    assert chat(**fields).sampling_params().structured_output == form


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
        {"guided_regex": "a", "response_format": {"type": "text"}},
        {"structured_outputs": {"json_object": True, "regex": "a"}},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_two_forms_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exactly one|cannot both"):
        chat(**fields)


def test_a_priority_below_the_default_counts_as_the_default() -> None:
    assert [chat(priority=number).priority for number in (-5, 0, 5)] == [0, 0, 5]


def test_results_of_tools_need_no_id() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "5"}]
    prompt, _ = chat(messages=messages).prompts_and_media()[0]
    assert prompt.messages[-1] == {"role": "tool", "content": "5"}  # type: ignore[union-attr]
    with pytest.raises(ValidationError, match="tool messages only"):
        chat(messages=[{"role": "user", "content": "Hi", "tool_call_id": "c"}])
