"""`haystack-ai`: its chat generator."""

import base64

from features import ABOUT_PICTURE, FORM, KEY, LOOK, MODEL, PICTURE, PLAIN, QUESTION, TOLD, URL, is_equal, report
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import Tool
from haystack.utils import Secret

tool = Tool(name="look", description="Look there.", parameters=LOOK, function=lambda where: "red")
said = [ChatMessage.from_user(QUESTION)]
shown = ImageContent(base64_image=base64.b64encode(PICTURE).decode(), mime_type="image/png")


def ask(messages, **options):
    model = OpenAIChatGenerator(api_key=Secret.from_token(KEY), api_base_url=f"{URL}/v1", model=MODEL, **options)
    (answer,) = model.run(messages)["replies"]
    return answer


def chat():
    is_equal(ask(said).text, PLAIN)


def stream():
    pieces = []
    ask(said, streaming_callback=lambda chunk: pieces.append(chunk.content))
    is_equal("".join(pieces), PLAIN)


def picture():
    is_equal(ask([ChatMessage.from_user(content_parts=[QUESTION, shown])]).text, ABOUT_PICTURE)


def structured():
    answer = ask(said, generation_kwargs={"response_format": FORM})
    is_equal(answer.text.replace(" ", ""), '{"colour":"red"}')


def answer_to(result):
    asked = ask(said, tools=[tool], streaming_callback=lambda chunk: None)
    is_equal((asked.tool_call.tool_name, asked.tool_call.arguments), ("look", {"where": "left"}))
    return ask([*said, asked, ChatMessage.from_tool(result, origin=asked.tool_call)], tools=[tool]).text


def tools_streamed():
    is_equal(answer_to("red"), TOLD)


report(
    chat,
    stream,
    picture,
    structured,
    tools_streamed,
    tool_picture="it refuses pictures of tools in chat completions",
    thinking="it drops them in chat completions",
)
