"""A chat template cannot compute without end: it fails as the operator's problem, and the next prompt goes on."""

import time
from typing import Any

import pytest

from raylens.preprocess import chat_template
from raylens.preprocess.chat_template import ChatTemplate
from raylens.preprocess.schema import ChatPrompt, ChatTemplateError
from tests.preprocess.test_chat_template import template

HELLO = ChatPrompt([{"role": "user", "content": "Hello"}])
TALK = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOP = "{% for i in range(99999) %}"
WITHOUT_END = {
    "counts too far": "{% for i in range(99999999) %}{% endfor %}",
    "nested loops": LOOP * 3 + "{% endfor %}" * 3,
    "a macro that calls itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
    ),
    "a long text": "{{ ('a' * 10**10) | length }}",
    "a long list": "{{ ([0] * 10**10) | length }}",
    "a large number": "{{ 9 ** (9 ** 9) > 0 }}",
    "squares": (
        "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n > 0 }}"
    ),
}


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)


@pytest.mark.parametrize("name", WITHOUT_END)
def test_a_template_without_end_fails(name: str, caplog: pytest.LogCaptureFixture) -> None:
    started = time.thread_time()
    chat, _ = template(WITHOUT_END[name] + TALK)
    assert "chats will fail: the model's chat template" in caplog.text
    with pytest.raises(ChatTemplateError, match="the model's chat template (takes more than 0.2 s|counts too far)"):
        chat.fill(HELLO)
    assert time.thread_time() - started < 5


def filled(chat: ChatTemplate, text: str) -> Any:
    try:
        return chat.fill(ChatPrompt([{"role": "user", "content": text}]))
    except ChatTemplateError as error:
        return error


@pytest.mark.parametrize("name", WITHOUT_END)
def test_other_conversations_go_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    chat, _ = template("{% if messages[0].content == 'never' %}" + WITHOUT_END[name] + "{% endif %}" + TALK)
    assert not caplog.records
    assert filled(chat, "a") == "a"
    assert isinstance(filled(chat, "never"), ChatTemplateError)
    assert filled(chat, "b") == "b"


def test_what_templates_compute_otherwise_stays() -> None:
    chat, _ = template(
        "{{ '-' * 3 }}{{ 3 * 'ab' }}{{ 2 ** 3 }}{{ 2 * 2.5 }}{{ 2 ** -1 }}{{ [1] * 2 }}{{ true * 2 }}" + TALK
    )
    assert chat.fill(HELLO) == "---ababab85.00.5[1, 1]2Hello"
