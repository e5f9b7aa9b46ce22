"""The Responses API through the official client."""

import json
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response
from PIL import Image

from raylens.deployments.pipeline.long_texts import SLICE_BYTES
from raylens.preprocess.data_url import data_url
from tests.pictures import disc, encoded
from tests.waiting import wait_until

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


def test_a_conversation_goes_on_from_a_stored_response(client: OpenAI) -> None:
    """With no word of it in the request, whole and streamed, to the same answer as with the whole conversation."""
    first = client.responses.create(model="shapes", input=[question(RED)], instructions="Answer in one word.")
    assert first.to_dict()["store"] is True
    again = "How many shapes are there?"
    second = client.responses.create(model="shapes", input=again, previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("one", first.id)
    whole: Any = [question(RED), *[item.model_dump() for item in first.output], {"role": "user", "content": again}]
    same = client.responses.create(model="shapes", input=whole)
    assert second.usage is not None is not same.usage
    assert second.usage.input_tokens == same.usage.input_tokens
    counted = client.responses.input_tokens.count(model="shapes", input=again, previous_response_id=first.id)
    assert counted.input_tokens == same.usage.input_tokens
    with client.responses.stream(model="shapes", input="Where is it?", previous_response_id=second.id) as stream:
        third = stream.get_final_response()
    whole += [*[item.model_dump() for item in second.output], {"role": "user", "content": "Where is it?"}]
    assert third.output_text == client.responses.create(model="shapes", input=whole).output_text
    assert client.responses.retrieve(third.id).output_text == third.output_text


def test_a_stored_response_tells_its_items_until_it_is_deleted(client: OpenAI) -> None:
    first = client.responses.create(model="shapes", input=[question(RED)])
    second = client.responses.create(model="shapes", input="Who are you?", previous_response_id=first.id)
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in items] == ["message"] * 3, "pages follow each other"
    asked, answered, asked_again = (
        item.model_dump() for item in client.responses.input_items.list(second.id, order="asc")
    )
    assert asked["content"][0]["image_url"] == data_url(RED)
    assert answered["content"][0]["text"] == "red"
    (part,) = asked_again["content"]
    assert (part["type"], part["text"]) == ("input_text", "Who are you?")
    newest = client.responses.input_items.list(second.id, limit=1)
    assert (newest.data[0].id, newest.has_more) == (asked_again["id"], True)
    with pytest.raises(BadRequestError, match="no item 'msg_x'"):
        client.responses.input_items.list(second.id, after="msg_x")
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError, match="no response") as gone:
        client.responses.retrieve(first.id)
    assert gone.value.code == "response_not_found"
    with pytest.raises(BadRequestError, match="no response") as broken:
        client.responses.create(model="shapes", input="And?", previous_response_id=second.id)
    assert (broken.value.code, broken.value.param) == ("previous_response_not_found", "previous_response_id")
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_a_response_that_is_not_to_be_stored_is_not(client: OpenAI) -> None:
    answer = client.responses.create(model="shapes", input="Who are you?", store=False)
    assert answer.to_dict()["store"] is False
    with pytest.raises(NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_large_picture_of_a_stored_response_is_found_again(client: OpenAI) -> None:
    """Its text is far longer than what stays in a body's JSON."""
    noise = Image.effect_noise((400, 400), 90).convert("RGB")
    noise.paste((255, 255, 255), (100, 100, 300, 300))
    url = data_url(encoded(noise))
    assert len(url) > 4 * SLICE_BYTES
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": QUESTION}]
    said: Any = [{"role": "user", "content": content}]
    first = client.responses.create(model="shapes", input=said)
    (item,) = client.responses.input_items.list(first.id)
    assert item.model_dump()["content"][0]["image_url"] == url
    second = client.responses.create(model="shapes", input="And now?", previous_response_id=first.id)
    said += [*[one.model_dump() for one in first.output], {"role": "user", "content": "And now?"}]
    assert client.responses.create(model="shapes", input=said).output_text == second.output_text


def ended(client: OpenAI, response: Response) -> Response:
    """The response, once the work on it is over."""
    told = [response]

    def is_over() -> bool:
        told.append(client.responses.retrieve(response.id))
        return told[-1].status not in ("queued", "in_progress")

    wait_until(is_over)
    return told[-1]


def test_a_response_is_made_in_the_background(client: OpenAI) -> None:
    begun = client.responses.create(model="shapes", input=[question(RED)], background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    made = ended(client, begun)
    assert (made.status, made.output_text) == ("completed", "red")
    again = client.responses.create(
        model="shapes", input="How many shapes are there?", previous_response_id=made.id, background=True
    )
    assert ended(client, again).output_text == "one"
    assert client.responses.cancel(made.id).status == "completed", "it was whole already"


def test_work_in_the_background_is_cancelled(client: OpenAI, app_url: str) -> None:
    endless = {"ignore_eos": True, "min_tokens": 1900}
    many = [
        client.responses.create(
            model="shapes", input=f"Hello {number}", max_output_tokens=1900, background=True, extra_body=endless
        )
        for number in range(2)
    ]
    assert [client.responses.retrieve(one.id).status for one in many] == ["in_progress"] * 2
    assert client.responses.cancel(many[0].id).status == "cancelled"
    client.responses.delete(many[1].id)
    assert client.responses.retrieve(many[0].id).status == "cancelled"
    wait_until(lambda: running(app_url) == 0)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(many[1].id)


def running(app_url: str) -> float:
    """The sequences in the engine."""
    lines = httpx.get(f"{app_url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("raylens_num_requests_running{"))


def test_what_goes_wrong_in_the_background_is_told_by_the_response(client: OpenAI) -> None:
    begun = client.responses.create(model="shapes", input=[question(b"no picture")], background=True)
    failed = ended(client, begun)
    assert failed.error is not None
    assert (failed.status, failed.error.code) == ("failed", "invalid_image")
    said: Any = {"model": "shapes", "input": "Hi", "background": True}
    for fields in ({"stream": True}, {"store": False}, {"previous_response_id": "resp_1"}, {"model": "other"}):
        with pytest.raises(APIStatusError) as refused:
            client.responses.create(**said | fields)
        assert refused.value.status_code in (400, 404)
    whole = client.responses.create(model="shapes", input="Hi")
    with pytest.raises(BadRequestError, match="not made in the background"):
        client.responses.cancel(whole.id)
