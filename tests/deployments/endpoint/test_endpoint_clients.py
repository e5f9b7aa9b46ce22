"""Clients beside the official one, as their users use them."""

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

from deployments.demo import picture_part
from tests.deployments.endpoint.recorded_bodies import PLAIN, assert_is_answered
from tests.pictures import disc, encoded

RED = encoded(disc("red", (96, 96), (36, 36)))


class Colour(BaseModel):
    """The colour of a shape."""

    name: Literal["red", "blue"]
    sure: bool


def question(text: str = "What colour is the circle?") -> HumanMessage:
    return HumanMessage([picture_part(RED), {"type": "text", "text": text}])


def chat(app_url: str, **options: Any) -> ChatOpenAI:
    key = SecretStr("unused")
    return ChatOpenAI(model="shapes", base_url=f"{app_url}/v1", api_key=key, max_retries=0, timeout=60, **options)


def test_langchain_asks_and_streams_about_a_picture(app_url: str) -> None:
    answer = chat(app_url).invoke([question()])
    assert answer.content == "red"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(chat(app_url, stream_usage=True).stream([question("Describe the picture.")]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessageChunk)
    assert whole.content == chat(app_url).invoke([question("Describe the picture.")]).content
    assert len(chunks) > 2


async def test_langchain_asks_many_at_once(app_url: str) -> None:
    answers = await chat(app_url).abatch([[question()]] * 6)
    assert [answer.content for answer in answers] == ["red"] * 6


def test_langchain_asks_for_a_form(app_url: str) -> None:
    structured = chat(app_url, max_completion_tokens=200).with_structured_output(Colour, method="json_schema")
    assert isinstance(structured.invoke([question()]), Colour)


def test_langchain_uses_the_responses_api(app_url: str) -> None:
    answer = chat(app_url, use_responses_api=True).invoke([question()])
    assert answer.text == "red"


def test_langchain_completes(app_url: str) -> None:
    key = SecretStr("unused")
    completions = OpenAI(model="shapes", base_url=f"{app_url}/v1", api_key=key, max_retries=0, max_tokens=20)
    assert completions.invoke("USER: Who are you? ASSISTANT:").strip()


@pytest.mark.parametrize("name", PLAIN)
def test_recorded_bodies_are_answered(app_url: str, name: str) -> None:
    assert_is_answered(app_url, *PLAIN[name])
