"""The `openai` package: chat completions and the Responses API."""

import json

from features import (
    ABOUT_PICTURE,
    AFTER_THOUGHT,
    KEY,
    LOOK,
    MODEL,
    PICTURE_URL,
    PLAIN,
    QUESTION,
    SCHEMA,
    SHOWN,
    THINK,
    THOUGHT,
    TOLD,
    URL,
    is_equal,
    report,
)
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
tool = {"type": "function", "function": {"name": "look", "parameters": LOOK}}
said = [{"role": "user", "content": QUESTION}]


def chat():
    answer = client.chat.completions.create(model=MODEL, messages=said)
    is_equal(answer.choices[0].message.content, PLAIN)
    is_equal(client.responses.create(model=MODEL, input=QUESTION).output_text, PLAIN)


def stream():
    with client.chat.completions.stream(model=MODEL, messages=said) as events:
        is_equal("".join(event.delta for event in events if event.type == "content.delta"), PLAIN)
    with client.responses.stream(model=MODEL, input=QUESTION) as events:
        is_equal(events.get_final_response().output_text, PLAIN)


def picture():
    parts = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}]
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    is_equal(answer.choices[0].message.content, ABOUT_PICTURE)


def structured():
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=said, response_format=form)
    is_equal(json.loads(answer.choices[0].message.content), {"colour": "red"})


def tools_streamed():
    with client.chat.completions.stream(model=MODEL, messages=said, tools=[tool]) as events:
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    is_equal((call.function.name, json.loads(call.function.arguments)), ("look", {"where": "left"}))
    result = {"role": "tool", "tool_call_id": call.id, "content": "red"}
    asked = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]}
    answer = client.chat.completions.create(model=MODEL, messages=[*said, asked, result], tools=[tool])
    is_equal(answer.choices[0].message.content, TOLD)


def tool_picture():
    first = client.responses.create(model=MODEL, input=QUESTION, tools=[{"type": "function", **tool["function"]}])
    (call,) = first.output
    shown = [{"type": "input_image", "image_url": PICTURE_URL}]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": shown}
    answer = client.responses.create(model=MODEL, input=[result], previous_response_id=first.id)
    is_equal(answer.output_text, SHOWN)


def thinking():
    answer = client.responses.create(model=MODEL, input=THINK)
    is_equal((answer.output[0].content[0].text.strip(), answer.output_text.strip()), (THOUGHT, AFTER_THOUGHT))


report(
    chat=chat,
    stream=stream,
    picture=picture,
    structured=structured,
    tools_streamed=tools_streamed,
    tool_picture=tool_picture,
    thinking=thinking,
)
