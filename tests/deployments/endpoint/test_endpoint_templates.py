"""Conversations of requests come out of chat templates of every form as out of transformers, texts as texts."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

from raylens.deployments.api.chat import ChatCompletionRequest
from raylens.deployments.api.responses import ResponsesRequest
from raylens.preprocess.chat_template import ChatTemplate
from raylens.preprocess.message_contents import Placeholder
from raylens.preprocess.schema import ChatPrompt, InvalidRequestError, Prompt
from tests.preprocess.chat_templates import TEMPLATES, Template
from tests.preprocess.parity import pair

MARKS = str.maketrans("", "", "\U000f0000\U000f0001")
"""What transformers puts around control tokens that a user typed."""
TEXTS = ["", "hi", " a b ", "\n", "[{'type': 'text'}]", '{"a": 1}', "<image>", "</s>é", "x</think>y", "{{ 1 }}"]
CALL = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

texts = st.sampled_from(TEXTS)
contents = texts | st.lists(texts, min_size=1, max_size=3).map(
    lambda parts: [{"type": "text", "text": part} for part in parts]
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "developer"])), "content": draw(contents)})
    for _ in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(contents)})
        if draw(st.integers(0, 3)) == 0:
            content = draw(st.none() | texts)
            messages.append({"role": "assistant", "content": content, "tool_calls": [CALL]})
            messages.append({"role": "tool", "tool_call_id": CALL["id"], "content": draw(contents)})
        messages.append({"role": "assistant", "content": draw(contents)})
    return [*messages, {"role": "user", "content": draw(contents)}]


class Filled:
    """A template filled by us and by transformers."""

    def __init__(self, template: Template, placeholder: str = "<image>") -> None:
        self.template = template
        self.theirs = copy.copy(pair("llava", "byte_level", "pil").theirs)
        self.theirs.chat_template = template.text
        self.chat_template = ChatTemplate(
            self.theirs, self.theirs.tokenizer, {"image": Placeholder(placeholder, placeholder)}
        )

    def ours(self, prompt: Prompt) -> str | None:
        """None: the template does not take the conversation."""
        assert isinstance(prompt, ChatPrompt)
        try:
            return self.chat_template.fill(prompt).translate(MARKS)
        except InvalidRequestError:
            return None

    def expected(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self._applied(messages, None)
        except (TemplateError, TypeError):
            pass
        try:
            return self._applied(messages, "")
        except (TemplateError, TypeError):
            return None

    def _applied(self, messages: list[dict[str, Any]], no_content: str | None) -> str:
        formed = [self._formed(message, no_content) for message in messages]
        text: str = self.theirs.apply_chat_template(formed, add_generation_prompt=True)
        return text

    def _formed(self, message: dict[str, Any], no_content: str | None) -> dict[str, Any]:
        role = "system" if message["role"] == "developer" else message["role"]
        content = no_content if message["content"] is None else message["content"]
        if role in self.template.list_roles and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif role not in self.template.list_roles and isinstance(content, list):
            content = "".join(part["text"] for part in content)
        calls = copy.deepcopy(message.get("tool_calls", []))
        for call in calls:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return {**message, "role": role, "content": content, **({"tool_calls": calls} if calls else {})}


@pytest.fixture(scope="module", params=TEMPLATES)
def filled(request: pytest.FixtureRequest) -> Filled:
    return Filled(TEMPLATES[request.param])


@settings(max_examples=15, deadline=None)
@given(messages=conversations())
def test_a_conversation_of_texts_is_transformers_own(filled: Filled, messages: list[dict[str, Any]]) -> None:
    body = {"model": "m", "messages": messages}
    assert filled.ours(ChatCompletionRequest.model_validate(body).prompts_and_media()[0][0]) == filled.expected(
        messages
    )


def test_the_template_takes_what_it_should(filled: Filled) -> None:
    """A template of which nothing but errors is compared would pass the test above."""
    for role in ("system", "assistant"):
        messages = [{"role": role, "content": "Said."}, {"role": "user", "content": "Hello"}]
        messages = messages if role == "system" else messages[::-1]
        text = filled.ours(ChatPrompt(messages))
        assert text is not None
        assert "Said." in text
        assert "Hello" in text
        assert "'type'" not in text


def test_items_of_responses_are_the_same_conversation(filled: Filled) -> None:
    call = {"type": "function_call", "call_id": CALL["id"], "name": "f", "arguments": '{"x": 1}'}
    items = [
        {"role": "user", "content": "Weather?"},
        call,
        {"type": "function_call_output", "call_id": CALL["id"], "output": "rain"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Rain."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": "rain"},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Sure?"},
    ]
    request = ResponsesRequest.model_validate({"model": "m", "instructions": "Be brief.", "input": items})
    assert filled.ours(request.prompts_and_media()[0][0]) == filled.expected(
        [{"role": "system", "content": "Be brief."}, *messages]
    )


def test_a_picture_has_its_placeholder(filled: Filled) -> None:
    """Where the template does not write it, it stands in the text, on a line of its own."""
    look, system = {"type": "text", "text": "Look: "}, {"role": "system", "content": "Be brief."}
    text = filled.ours(ChatPrompt([system, {"role": "user", "content": [look, {"type": "image"}]}]))
    if filled.template.writes_pictures:
        assert text is not None
        assert text.count("<image>") == 1
        assert "Look: " in text
        assert "Be brief." in text
        assert "'type'" not in text
        return
    placeholder = {"type": "text", "text": "<image>\n"}
    assert text == filled.expected([system, {"role": "user", "content": [look, placeholder]}])


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_picture_of_any_role_has_its_placeholder(filled: Filled, role: str) -> None:
    """Where the template writes pictures of users only, it stands at the beginning of the next user's message."""
    look = [{"type": "text", "text": "Look: "}, {"type": "image"}]
    asked = [{"role": "user", "content": "Hello"}] if role == "assistant" else []
    text = filled.ours(ChatPrompt([*asked, {"role": role, "content": look}, {"role": "user", "content": "Which?"}]))
    assert text is not None
    by_user = filled.ours(ChatPrompt([{"role": "user", "content": look}]))
    assert by_user is not None
    assert text.count("<image>") == by_user.count("<image>")
    told = text[: text.index("Which?")]
    assert "Look: " in told
    assert told.count("<image>") == text.count("<image>")
    assert "'type'" not in text


LATER: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"role": "system", "content": [{"type": "text", "text": "Be exact."}]},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Which?"},
    {"role": "system", "content": "Be kind."},
]


@pytest.mark.parametrize("num_later", [2, 4, 5], ids=str)
def test_the_system_may_speak_later(filled: Filled, num_later: int) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *LATER[:num_later]]
    text = filled.ours(ChatPrompt(messages))
    assert text is not None
    said = ["Be brief.", "Hello", "Be exact.", "Hi", "Which?", "Be kind."]
    assert all(one in text for one in said[: num_later + 1]), text


def test_users_around_it_become_one() -> None:
    user, system = ({"role": role, "content": role} for role in ("user", "system"))
    shown: dict[str, Any] = {"role": "system", "content": [{"type": "text", "text": "system"}, {"type": "image"}]}
    text = Filled(TEMPLATES["llama 2"]).ours(ChatPrompt([user, system, user]))
    assert text == "<s>[INST] <<SYS>>\nsystem\n<</SYS>>\n\nuser\nuser [/INST]"
    for messages in ([shown, user, system], [system, shown, user]):
        text = Filled(TEMPLATES["llama 2"]).ours(ChatPrompt(messages))
        assert text == "<s>[INST] <<SYS>>\nsystem\n\nsystem\n<</SYS>>\n\n<image>\nuser [/INST]"


@pytest.mark.parametrize("name", ["chatml", "chatml with the system first"])
@pytest.mark.parametrize("opening", [[{"role": "system", "content": "Be brief."}], []], ids=["second", "only"])
def test_it_does_so_in_its_place_or_at_the_beginning(name: str, opening: list[dict[str, Any]]) -> None:
    """Claude Code sends such a message behind each turn of a user."""
    filled = Filled(TEMPLATES[name])
    said = "\n\n".join([*(one["content"] for one in opening), "Be exact.", "Be kind."])
    moved = [{"role": "system", "content": said}, LATER[0], *LATER[2:4]]
    assert filled.ours(ChatPrompt([*opening, *LATER])) == filled.expected(
        [*opening, *LATER] if name == "chatml" else moved
    )


def test_a_picture_of_the_later_system_stays_in_order() -> None:
    shown = {"role": "system", "content": [{"type": "text", "text": "This is a cat."}, {"type": "image"}]}
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}
    text = Filled(TEMPLATES["chatml with the system first"]).ours(ChatPrompt([asked, shown]))
    assert text == (
        "<|im_start|>system\nThis is a cat.<|im_end|>\n"
        "<|im_start|>user\n<image>\nWhich?<image>\n<|im_end|>\n<|im_start|>assistant\n"
    )


CALLS = [{**CALL, "id": name, "function": {"name": "f", "arguments": {}}} for name in ("call12345", "call54321")]
CALLED: list[dict[str, Any]] = [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": CALLS}]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml of parts", ["<image>one", "two<image>", "assistant"]),
        ("chatml with tools", ["<image>", "one", "two", "<image>", "assistant"]),
        ("mistral", ["[TOOL_RESULTS]one", "[TOOL_RESULTS]two", "[INST]<image><image>[/INST]"]),
    ],
)
def test_pictures_of_tools_stand_there_or_behind_the_results(name: str, expected: list[str]) -> None:
    first = [{"type": "image"}, {"type": "text", "text": "one"}]
    second = [{"type": "text", "text": "two"}, {"type": "image"}]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(CALLS, (first, second), strict=True)
    ]
    text = Filled(TEMPLATES[name]).ours(ChatPrompt([*CALLED, *results]))
    assert text is not None
    behind = text
    for part in expected:
        assert part in behind, text
        behind = behind[behind.index(part) + len(part) :]
    assert text.count("<image>") == 2


def test_a_picture_behind_a_moved_one_moves_too() -> None:
    """Else the first placeholder would get the second picture."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
        "{% elif m.role == 'assistant' %}{{ m.content[0].text }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    shown: list[dict[str, str]] = [{"type": "text", "text": "A"}, {"type": "image"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": shown, "tool_calls": CALLS[:1]},
        {"role": "tool", "tool_call_id": CALLS[0]["id"], "content": [{"type": "text", "text": "B"}, {"type": "image"}]},
    ]
    text = Filled(Template(template, writes_pictures=True)).ours(ChatPrompt(messages))
    assert text == "[user]Go.[assistant]A[tool]B[user]<image><image>"


def test_a_moved_picture_comes_before_what_the_user_says_then() -> None:
    result = {"role": "tool", "tool_call_id": CALLS[0]["id"], "content": [{"type": "image"}]}
    messages = [*CALLED, result, {"role": "user", "content": "Which?"}]
    text = Filled(TEMPLATES["mistral"]).ours(ChatPrompt(messages))
    assert text is not None
    assert text.endswith("[INST]<image>Which?[/INST]")


@pytest.mark.parametrize("name", ["chatml", "printed", "chatml of parts"])
def test_a_picture_with_a_place_of_its_own_leaves_no_trace_in_the_text(name: str) -> None:
    filled = Filled(Template(TEMPLATES[name].text.replace("<image>", "")), placeholder="")
    text = filled.ours(ChatPrompt([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]))
    assert text == filled.expected([{"role": "user", "content": "Hi"}])


def test_a_placeholder_that_a_user_types_is_text(filled: Filled) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "<image> </s>"}, {"type": "image"}]}]
    text = filled.chat_template.fill(ChatPrompt(messages))
    assert text.count("\U000f0000<image>\U000f0001") == 1
    assert "\U000f0000</s>\U000f0001" in text
