"""`langchain-openai`: chat completions, and the Responses API where only that carries it."""

from typing import Literal

from features import (
    ABOUT_PICTURE,
    AFTER_THOUGHT,
    KEY,
    MODEL,
    PARTS,
    PICTURE_URL,
    PLAIN,
    QUESTION,
    SHOWN,
    THINK,
    TOLD,
    URL,
    is_equal,
    report,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY)


class Colour(BaseModel):
    colour: Literal["red"]


@tool
def look(where: Literal["left", "right"]) -> str:
    """Look there."""
    return "red"


def chat():
    is_equal(model.invoke(QUESTION).content, PLAIN)


def stream():
    is_equal("".join(chunk.content for chunk in model.stream(QUESTION)), PLAIN)


def picture():
    is_equal(model.invoke([HumanMessage(PARTS)]).content, ABOUT_PICTURE)


def structured():
    is_equal(model.with_structured_output(Colour).invoke(QUESTION), Colour(colour="red"))


def answer_to(content, model):
    with_tools, said = model.bind_tools([look]), HumanMessage(QUESTION)
    asked = None
    for chunk in with_tools.stream([said]):
        asked = chunk if asked is None else asked + chunk
    (call,) = asked.tool_calls
    is_equal((call["name"], call["args"]), ("look", {"where": "left"}))
    return with_tools.invoke([said, asked, ToolMessage(content, tool_call_id=call["id"])]).text


def tools_streamed():
    is_equal(answer_to("red", model), TOLD)


def tool_picture():
    shown = [{"type": "image_url", "image_url": {"url": PICTURE_URL}}]
    is_equal(answer_to(shown, model), SHOWN)
    by_responses = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, use_responses_api=True)
    is_equal(answer_to([{"type": "input_image", "image_url": PICTURE_URL}], by_responses), SHOWN)


def thinking():
    by_responses = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, use_responses_api=True)
    answer = by_responses.invoke(THINK)
    is_equal(answer.text.strip(), AFTER_THOUGHT)
    assert any(block["type"] == "reasoning" for block in answer.content_blocks), answer


report(chat, stream, picture, structured, tools_streamed, tool_picture, thinking)
