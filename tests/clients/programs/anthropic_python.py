"""The `anthropic` package."""

import base64

from anthropic import Anthropic
from features import (
    ABOUT_PICTURE,
    AFTER_THOUGHT,
    KEY,
    LOOK,
    MODEL,
    PICTURE,
    PLAIN,
    QUESTION,
    SAID,
    SCHEMA,
    SHOWN,
    THINK,
    THOUGHT,
    TOLD,
    URL,
    is_equal,
    report,
)

client = Anthropic(base_url=URL, api_key=KEY)
tool = {"name": "look", "input_schema": LOOK}
common = {"model": MODEL, "max_tokens": 64}
shown = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PICTURE).decode()},
}


def chat():
    is_equal(client.messages.create(messages=SAID, **common).content[0].text, PLAIN)


def stream():
    with client.messages.stream(messages=SAID, **common) as events:
        is_equal("".join(events.text_stream), PLAIN)


def picture():
    parts = [{"type": "text", "text": QUESTION}, shown]
    answer = client.messages.create(messages=[{"role": "user", "content": parts}], **common)
    is_equal(answer.content[0].text, ABOUT_PICTURE)


def structured():
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(messages=SAID, output_config=form, **common)
    is_equal(answer.content[-1].text.replace(" ", ""), '{"colour":"red"}')


def ask_for_call():
    with client.messages.stream(messages=SAID, tools=[tool], **common) as events:
        (call,) = events.get_final_message().content
    is_equal((call.name, call.input), ("look", {"where": "left"}))
    return call


def answer_to(content):
    call = ask_for_call()
    asked = {"role": "assistant", "content": [{"type": "tool_use", "id": call.id, "name": "look", "input": call.input}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": content}]}
    return client.messages.create(messages=[*SAID, asked, result], tools=[tool], **common).content[0].text


def tools_streamed():
    is_equal(answer_to("red"), TOLD)


def tool_picture():
    is_equal(answer_to([shown]), SHOWN)


def thinking():
    thinking, text = client.messages.create(messages=[{"role": "user", "content": THINK}], **common).content
    is_equal((thinking.thinking.strip(), text.text.strip()), (THOUGHT, AFTER_THOUGHT))


report(chat, stream, picture, structured, tools_streamed, tool_picture, thinking)
