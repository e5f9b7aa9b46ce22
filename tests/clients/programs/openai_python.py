"""The `openai` package: chat completions and the Responses API."""

import json

from features import (
    ABOUT_PICTURE,
    AFTER_THOUGHT,
    FORM,
    KEY,
    MODEL,
    PARTS,
    PICTURE_URL,
    PLAIN,
    QUESTION,
    SAID,
    SHOWN,
    THINK,
    THOUGHT,
    TOLD,
    TOOL,
    URL,
    is_equal,
    report,
)
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)


def chat():
    answer = client.chat.completions.create(model=MODEL, messages=SAID)
    is_equal(answer.choices[0].message.content, PLAIN)
    is_equal(client.responses.create(model=MODEL, input=QUESTION).output_text, PLAIN)


def stream():
    with client.chat.completions.stream(model=MODEL, messages=SAID) as events:
        is_equal("".join(event.delta for event in events if event.type == "content.delta"), PLAIN)
    with client.responses.stream(model=MODEL, input=QUESTION) as events:
        is_equal(events.get_final_response().output_text, PLAIN)


def picture():
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": PARTS}])
    is_equal(answer.choices[0].message.content, ABOUT_PICTURE)


def structured():
    answer = client.chat.completions.create(model=MODEL, messages=SAID, response_format=FORM)
    is_equal(json.loads(answer.choices[0].message.content), {"colour": "red"})


def tools_streamed():
    with client.chat.completions.stream(model=MODEL, messages=SAID, tools=[TOOL]) as events:
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    is_equal((call.function.name, json.loads(call.function.arguments)), ("look", {"where": "left"}))
    result = {"role": "tool", "tool_call_id": call.id, "content": "red"}
    asked = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]}
    answer = client.chat.completions.create(model=MODEL, messages=[*SAID, asked, result], tools=[TOOL])
    is_equal(answer.choices[0].message.content, TOLD)


def tool_picture():
    first = client.responses.create(model=MODEL, input=QUESTION, tools=[{"type": "function", **TOOL["function"]}])
    (call,) = first.output
    shown = [{"type": "input_image", "image_url": PICTURE_URL}]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": shown}
    answer = client.responses.create(model=MODEL, input=[result], previous_response_id=first.id)
    is_equal(answer.output_text, SHOWN)


def thinking():
    answer = client.responses.create(model=MODEL, input=THINK)
    is_equal((answer.output[0].content[0].text.strip(), answer.output_text.strip()), (THOUGHT, AFTER_THOUGHT))


report(chat, stream, picture, structured, tools_streamed, tool_picture, thinking)
