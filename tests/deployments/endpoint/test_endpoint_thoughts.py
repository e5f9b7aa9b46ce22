"""Thoughts before the answer, over HTTP, by a model whose words are scripted and whose template opens the thoughts. The
marks of its tool calls are special tokens."""

import json
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from raylens.deployments.config import AppConfig
from tests.scripted_model import save_scripted_model

# What a template of Qwen's does with thoughts, and one of FunctionGemma's with calls, as far as it matters here.
TEMPLATE = (
    "{%- for m in messages -%}{{- m.role ~ ':' -}}"
    "{%- if m.reasoning_content is string -%}{{- '(' ~ m.reasoning_content ~ ')' -}}{%- endif -%}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}"
    "{%- for part in m.content -%}{{- '<image>' if part.type == 'image' else part.text -}}{%- endfor -%}{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}<start_function_call>{{- 'call:' ~ call.function.name ~ '{' -}}"
    "{%- for key, value in call.function.arguments | dictsort -%}"
    "{{- key ~ ':' ~ ('<escape>' ~ value ~ '<escape>' if value is string else value) -}}{{- ',' if not loop.last -}}"
    "{%- endfor -%}{{- '}' -}}<end_function_call>{%- endfor -%}"
    "{{- '\\n' -}}{%- endfor -%}{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}"
    "{#- </think> -#}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think></think>' -}}"
    "{%- elif calls -%}{{- '<call>' -}}"
    "{%- elif reasoning_effort == 'high' -%}{{- '<go>' -}}{%- else -%}{{- '<think>' -}}{%- endif -%}"
)
SPECIAL_WORDS = ("<start_function_call>", "<end_function_call>", "<escape>")
CALL_IN_THOUGHTS = "<start_function_call>call:weather{city:<escape>Rome<escape>}<end_function_call> would be a call."
NEXT_WORDS = {
    "<go>": "<think>",
    "<think>": "\nI see",
    "\nI see": " a cat. ",
    " a cat. ": CALL_IN_THOUGHTS,
    CALL_IN_THOUGHTS: "\n",
    "\n": "</think>",
    "</think>": "\n\n",
    "\n\n": "A cat",
    "A cat": ".",
    ".": "",
    "<call>": "I look.",
    "I look.": "<start_function_call>",
    "<start_function_call>": "call:weather{}",
    "call:weather{}": "<end_function_call>",
    "<end_function_call>": "",
}
THOUGHTS = f"I see a cat. {CALL_IN_THOUGHTS}"
NUM_THOUGHT_TOKENS = 5
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HELLO: Any = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def app_config(tmp_path_factory: pytest.TempPathFactory) -> AppConfig:
    folder = tmp_path_factory.mktemp("thinking")
    save_scripted_model(folder, NEXT_WORDS, TEMPLATE, SPECIAL_WORDS)
    settings = {"model": str(folder), "served_model_name": "thinker", "encode": {"placement": "inline"}}
    return AppConfig.model_validate({**settings, "dtype": "float32", "chat": {"trust_request_template": True}})


def ask(client: OpenAI, **options: Any) -> Any:
    options = {"messages": HELLO, "temperature": 0, "max_tokens": 60, **options}
    return client.chat.completions.create(model="thinker", **options)


def test_a_chat_tells_thoughts_apart(client: OpenAI) -> None:
    whole = ask(client)
    (choice,) = whole.choices
    assert (choice.message.reasoning_content, choice.message.content) == (THOUGHTS, "A cat.")
    assert choice.message.reasoning == THOUGHTS
    assert choice.finish_reason == "stop"
    assert whole.usage.completion_tokens_details.reasoning_tokens == NUM_THOUGHT_TOKENS
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHTS
    assert "".join(delta.content or "" for delta in deltas) == "A cat."
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == NUM_THOUGHT_TOKENS


def test_a_model_that_writes_the_start_tag_itself_thinks_too(client: OpenAI) -> None:
    whole = ask(client, reasoning_effort="high")
    assert (whole.choices[0].message.reasoning_content, whole.choices[0].message.content) == (THOUGHTS, "A cat.")
    assert whole.usage.completion_tokens_details.reasoning_tokens == NUM_THOUGHT_TOKENS + 1


@pytest.mark.parametrize(
    "options",
    [{"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}],
    ids=["effort", "variable"],
)
def test_thinking_can_be_turned_off(client: OpenAI, options: dict[str, Any]) -> None:
    whole = ask(client, **options)
    assert whole.choices[0].message.content.strip() == "A cat."
    assert not hasattr(whole.choices[0].message, "reasoning_content")
    assert whole.usage.completion_tokens_details is None


def test_thoughts_can_be_left_out(client: OpenAI) -> None:
    message = ask(client, extra_body={"include_reasoning": False}).choices[0].message
    assert (message.content, hasattr(message, "reasoning")) == ("A cat.", False)


def test_an_answer_that_ends_within_thoughts_has_no_text(client: OpenAI) -> None:
    choice = ask(client, max_tokens=2).choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("I see a cat.", "")
    assert choice.finish_reason == "length"


def test_a_form_holds_behind_the_thoughts(client: OpenAI) -> None:
    message = ask(client, extra_body={"structured_outputs": {"choice": ["red", "blue"]}}).choices[0].message
    assert message.reasoning_content == THOUGHTS
    assert message.content in ("red", "blue")


def test_a_form_holds_behind_thoughts_that_the_model_begins_itself(client: OpenAI) -> None:
    form = {"structured_outputs": {"choice": ["red", "blue"]}}
    message = ask(client, reasoning_effort="high", extra_body=form).choices[0].message
    assert message.reasoning_content == THOUGHTS
    assert message.content in ("red", "blue")
    none = ask(client, reasoning_effort="none", extra_body=form).choices[0].message
    assert (none.content in ("red", "blue"), hasattr(none, "reasoning_content")) == (True, False)


@pytest.mark.parametrize("effort", ["low", "high"], ids=["template begins them", "model begins them"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_thoughts_end_when_their_budget_is_used_up(client: OpenAI, effort: str, temperature: float) -> None:
    options: Any = {"reasoning_effort": effort, "temperature": temperature, "logprobs": True}
    for budget, thought in ((0, ""), (1, "I see"), (2, "I see a cat."), (100, THOUGHTS), (-1, THOUGHTS)):
        whole = ask(client, **options, extra_body={"thinking_token_budget": budget})
        message = whole.choices[0].message
        assert (getattr(message, "reasoning_content", ""), message.content) == (thought, "A cat."), budget
        if thought != THOUGHTS:
            num_thought_tokens = budget + 1 + (effort == "high")
            assert whole.usage.completion_tokens_details.reasoning_tokens == num_thought_tokens
    with pytest.raises(BadRequestError) as refused:
        ask(client, extra_body={"thinking_token_budget": -2})
    assert refused.value.param == "thinking_token_budget"


def test_a_form_holds_behind_thoughts_that_were_cut(client: OpenAI) -> None:
    body = {"structured_outputs": {"choice": ["red", "blue"]}, "thinking_token_budget": 1}
    for effort in ("low", "high"):
        message = ask(client, reasoning_effort=effort, extra_body=body).choices[0].message
        assert message.reasoning_content == "I see"
        assert message.content in ("red", "blue")


def test_a_message_of_anthropic_has_the_budget_of_its_thinking(app_url: str) -> None:
    body = {"model": "thinker", "max_tokens": 60, "temperature": 0, "messages": HELLO}
    body["thinking"] = {"type": "enabled", "budget_tokens": 2}
    answer = httpx.post(f"{app_url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert [block.get("thinking", block.get("text")) for block in answer.json()["content"]] == [
        "I see a cat.",
        "A cat.",
    ]


def test_a_forced_call_comes_behind_the_thoughts_and_a_quoted_one_is_none(client: OpenAI) -> None:
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = ask(client, max_tokens=200, **forced).choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
    assert (choice.message.reasoning_content, choice.finish_reason) == (THOUGHTS, "tool_calls")
    free = ask(client, tools=[WEATHER]).choices[0].message
    assert (free.tool_calls, free.content) == (None, "A cat.")


def test_calls_between_special_tokens_are_found(client: OpenAI) -> None:
    options: Any = {"tools": [WEATHER], "extra_body": {"chat_template_kwargs": {"calls": True}}}
    (choice,) = ask(client, **options).choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert (call.function.name, call.function.arguments) == ("weather", "{}")
    without = ask(client, extra_body=options["extra_body"]).choices[0].message
    assert (without.content, without.tool_calls) == ("I look.call:weather{}", None)


def test_earlier_thoughts_reach_the_template(client: OpenAI) -> None:
    def num_tokens(**thoughts: str) -> int:
        said = {"role": "assistant", "content": "Hi.", **thoughts}
        tokens: int = ask(client, messages=[*HELLO, said, *HELLO]).usage.prompt_tokens
        return tokens

    plain = num_tokens()
    assert num_tokens(reasoning_content="Why?") == num_tokens(reasoning="Why?") == plain + len("(Why?)")


def test_responses_have_a_reasoning_item(client: OpenAI, app_url: str) -> None:
    response = client.responses.create(model="thinker", input="What is it?", temperature=0)
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert (reasoning.content[0].text, response.output_text) == (THOUGHTS, "A cat.")
    assert message.type == "message"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == NUM_THOUGHT_TOKENS
    events = list(client.responses.create(model="thinker", input="What is it?", temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == THOUGHTS
    done = kinds.index("response.reasoning_text.done")
    assert kinds[done : done + 4] == [
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
    ]
    thoughts, said = response.model_dump()["output"]
    question = {"role": "user", "content": "What is it?"}
    num_tokens = []
    for turn in ([thoughts, said], [said]):
        body = {"model": "thinker", "input": [question, *turn, question], "temperature": 0}
        answer = httpx.post(f"{app_url}/v1/responses", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        num_tokens.append(answer.json()["usage"]["input_tokens"])
    assert num_tokens[0] > num_tokens[1], "the thoughts are a part of the conversation"


def test_completions_are_raw(client: OpenAI) -> None:
    completion = client.completions.create(model="thinker", prompt="<think>", temperature=0, max_tokens=60)
    assert completion.choices[0].text == f"\n{THOUGHTS}\n</think>\n\nA cat."


def test_a_request_may_bring_a_template(client: OpenAI, app_url: str) -> None:
    """With its own form of thoughts: this one has none, so that all of the answer is text."""
    own = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    body = {"chat_template": own, "return_token_ids": True}
    told = ask(client, max_tokens=8, extra_body=body)
    text = "".join(f"[{message['role']}] {message['content']}" for message in HELLO)
    tokens = httpx.post(f"{app_url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"]
    assert told.prompt_token_ids == tokens
    assert told.choices[0].message.model_extra.get("reasoning") is None
    assert ask(client, max_tokens=1, extra_body={"return_token_ids": True}).prompt_token_ids != tokens
    for wrong in ("{% for %}", "{{ messages[0].missing.field }}", "{{ 'x' * 10**9 }}"):
        with pytest.raises(BadRequestError) as caught:
            ask(client, extra_body={"chat_template": wrong})
        assert caught.value.param in ("chat_template", "messages"), wrong
