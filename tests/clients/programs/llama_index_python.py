"""`llama-index`: its model for servers like OpenAI's."""

from typing import Literal

from features import (
    ABOUT_PICTURE,
    AFTER_THOUGHT,
    KEY,
    MODEL,
    PICTURE,
    PLAIN,
    QUESTION,
    THINK,
    THOUGHT,
    TOLD,
    URL,
    is_equal,
    report,
)
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

model = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
)


class Colour(BaseModel):
    colour: Literal["red"]


def look(where: Literal["left", "right"]) -> str:
    """Look there."""
    return "red"


said = [ChatMessage(role="user", content=QUESTION)]
tool = FunctionTool.from_defaults(look)


def chat():
    is_equal(model.chat(said).message.content, PLAIN)


def stream():
    is_equal("".join(chunk.delta for chunk in model.stream_chat(said)), PLAIN)


def picture():
    blocks = [TextBlock(text=QUESTION), ImageBlock(image=PICTURE, image_mimetype="image/png")]
    is_equal(model.chat([ChatMessage(role="user", blocks=blocks)]).message.content, ABOUT_PICTURE)


def structured():
    is_equal(model.as_structured_llm(Colour).chat(said).raw, Colour(colour="red"))


def tools_streamed():
    last = list(model.stream_chat_with_tools([tool], chat_history=said))[-1]
    (call,) = model.get_tool_calls_from_response(last)
    is_equal((call.tool_name, call.tool_kwargs), ("look", {"where": "left"}))
    result = ChatMessage(role="tool", content="red", additional_kwargs={"tool_call_id": call.tool_id})
    answer = model.chat_with_tools([tool], chat_history=[*said, last.message, result])
    is_equal(answer.message.content, TOLD)


def thinking():
    message = model.chat([ChatMessage(role="user", content=THINK)]).message
    thoughts = [block.content.strip() for block in message.blocks if isinstance(block, ThinkingBlock)]
    is_equal((thoughts, message.content.strip()), ([THOUGHT], AFTER_THOUGHT))


report(
    chat, stream, picture, structured, tools_streamed, thinking, tool_picture="it sends the text of tools' results only"
)
