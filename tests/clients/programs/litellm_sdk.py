"""`litellm` as a library, in its form for vLLM's servers."""

import json

import litellm
from features import (
    ABOUT_PICTURE,
    AFTER_THOUGHT,
    FORM,
    KEY,
    MODEL,
    PARTS,
    PICTURE_URL,
    PLAIN,
    SAID,
    THINK,
    THOUGHT,
    TOLD,
    TOOL,
    URL,
    is_equal,
    report,
)


def ask(messages, **options):
    return litellm.completion(f"hosted_vllm/{MODEL}", messages, api_base=f"{URL}/v1", api_key=KEY, **options)


def text_of(answer):
    return answer.choices[0].message.content


def chat():
    is_equal(text_of(ask(SAID)), PLAIN)


def stream():
    is_equal("".join(chunk.choices[0].delta.content or "" for chunk in ask(SAID, stream=True)), PLAIN)


def picture():
    is_equal(text_of(ask([{"role": "user", "content": PARTS}])), ABOUT_PICTURE)


def structured():
    is_equal(json.loads(text_of(ask(SAID, response_format=FORM))), {"colour": "red"})


def called():
    chunks = list(ask(SAID, tools=[TOOL], stream=True))
    message = litellm.stream_chunk_builder(chunks, messages=SAID).choices[0].message
    (call,) = message.tool_calls
    is_equal((call.function.name, json.loads(call.function.arguments)), ("look", {"where": "left"}))
    return message, call.id


def answer_to(content):
    message, call_id = called()
    result = {"role": "tool", "tool_call_id": call_id, "content": content}
    return text_of(ask([*SAID, message.model_dump(), result], tools=[TOOL]))


def tools_streamed():
    is_equal(answer_to("red"), TOLD)


def tool_picture():
    # It moves the picture into a message of the user behind the tool's.
    is_equal(answer_to([{"type": "image_url", "image_url": {"url": PICTURE_URL}}]), ABOUT_PICTURE)


def thinking():
    message = ask([{"role": "user", "content": THINK}]).choices[0].message
    is_equal((message.reasoning_content.strip(), message.content.strip()), (THOUGHT, AFTER_THOUGHT))


report(chat, stream, picture, structured, tools_streamed, tool_picture, thinking)
