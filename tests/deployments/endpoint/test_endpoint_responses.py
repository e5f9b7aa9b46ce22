"""The Responses API through the official client."""

import json
from typing import Any

import pytest
from openai import APIStatusError, BadRequestError, OpenAI

from raylens.preprocess.data_url import data_url
from tests.pictures import disc, encoded

RED = encoded(disc("red", (96, 96), (36, 36)))
QUESTION = "What colour is the circle?"


def question(picture: bytes) -> Any:
    return {
        "role": "user",
        "content": [{"type": "input_image", "image_url": data_url(picture)}, {"type": "input_text", "text": QUESTION}],
    }


def test_the_official_client_asks(client: OpenAI) -> None:
    text = client.responses.create(model="shapes", input="Who are you?")
    chat = client.chat.completions.create(model="shapes", messages=[{"role": "user", "content": "Who are you?"}])
    assert text.output_text == chat.choices[0].message.content
    answer = client.responses.create(model="shapes", input=[question(RED)], extra_body={"stage_timings": True})
    assert answer.output_text == "red"
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.model_extra is not None
    assert "prefill" in answer.model_extra["stage_timings"]["seconds"]
    # A conversation goes on with what came out.
    history: Any = [question(RED), *[item.model_dump() for item in answer.output]]
    history.append({"role": "user", "content": "How many shapes are there?"})
    assert client.responses.create(model="shapes", input=history).output_text == "one"


def test_the_official_client_streams(client: OpenAI) -> None:
    with client.responses.stream(model="shapes", input=[question(RED)]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "red"
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    events = list(client.responses.create(model="shapes", input=[question(RED)], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_tokens_of_an_input_are_counted(client: OpenAI) -> None:
    said: Any = {"input": [question(RED)], "instructions": "Answer in one word."}
    answer = client.responses.create(model="shapes", **said)
    counted = client.responses.input_tokens.count(model="shapes", **said)
    assert answer.usage is not None
    assert (counted.input_tokens, counted.object) == (answer.usage.input_tokens, "response.input_tokens")
    with pytest.raises(BadRequestError) as refused:
        client.responses.input_tokens.count(model="shapes", input="word " * 20_000)
    assert refused.value.param == "input"


def test_an_answer_that_is_cut_off_says_so(client: OpenAI) -> None:
    answer = client.responses.create(model="shapes", input="Hello", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model="shapes", input="Hello", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"


def test_an_answer_has_the_form_that_was_asked_for(client: OpenAI) -> None:
    properties = {"sure": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["sure"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "sureness", "schema": schema, "strict": True}}
    answer = client.responses.create(model="shapes", input=[question(RED)], text=form)
    assert json.loads(answer.output_text)["sure"] in (True, False)


def test_what_is_not_served_is_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="previous_response_id"):
        client.responses.create(model="shapes", input="Hi", previous_response_id="resp_1")
    with pytest.raises(BadRequestError, match=r"input\[0\].content\[0\].input_image"):
        client.responses.create(model="shapes", input=[question(b"no picture")])
    with pytest.raises(BadRequestError, match="has only reasoning") as caught:
        client.responses.create(model="shapes", input=[{"type": "reasoning", "id": "rs_1", "summary": []}])
    assert caught.value.param == "input"
    with pytest.raises(APIStatusError, match="model"):
        client.responses.create(model="other", input="Hi")
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="shapes", input="word " * 3000)
    assert caught.value.code == "context_length_exceeded"
    assert client.responses.create(model="shapes", input="word " * 3000, truncation="auto").status in (
        "completed",
        "incomplete",
    )
