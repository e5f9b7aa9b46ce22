"""PDFs in conversations of all APIs: the model sees each page as a picture."""

import base64
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import APIStatusError, OpenAI
from PIL import Image

from raylens.preprocess.data_url import data_url
from raylens.preprocess.document_pages import pages_of
from tests.documents import pdf_of
from tests.pictures import disc

TEXT = {"type": "text", "text": "What is in these pictures?"}
WHOLE: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def page(colour: str) -> Image.Image:
    return disc(colour, (96, 96), (36, 36))


PDF = pdf_of(page("red"), page("blue"))
BARE = base64.b64encode(PDF).decode()
PDF_URL = data_url(PDF, "application/pdf")


def chat(client: OpenAI, *parts: Any) -> Any:
    return client.chat.completions.create(
        model="shapes",
        messages=[{"role": "user", "content": [*parts]}],
        extra_body={"return_token_ids": True},
        **WHOLE,
    )


@pytest.fixture(scope="module")
def by_pictures(client: OpenAI) -> Any:
    """The answer to the pages as pictures."""
    pictures = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in pages_of(PDF, 4)]
    return chat(client, *pictures, TEXT)


@pytest.fixture(scope="module")
def file_id(client: OpenAI) -> str:
    return client.files.create(file=("pages.pdf", PDF, "application/pdf"), purpose="user_data").id


def test_a_chat_shows_its_pages(client: OpenAI, by_pictures: Any, file_id: str) -> None:
    files: list[dict[str, str]] = [
        {"file_data": PDF_URL, "filename": "a.pdf"},
        {"file_data": BARE},
        {"file_id": file_id},
    ]
    for file in files:
        answer = chat(client, {"type": "file", "file": file}, TEXT)
        assert answer.prompt_token_ids == by_pictures.prompt_token_ids
        assert answer.choices[0].message.content == by_pictures.choices[0].message.content


def test_pages_stand_where_the_document_does(client: OpenAI) -> None:
    red, blue = ({"type": "image_url", "image_url": {"url": data_url(one)}} for one in pages_of(PDF, 4))
    file = {"type": "file", "file": {"file_data": PDF_URL}}
    expected = chat(client, blue, red, blue, TEXT, red)
    found = chat(client, blue, file, TEXT, red)
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.choices[0].message.content == expected.choices[0].message.content


def test_responses_and_messages_take_documents(client: OpenAI, app_url: str, by_pictures: Any, file_id: str) -> None:
    text = by_pictures.choices[0].message.content
    for file in ({"file_data": PDF_URL, "filename": "a.pdf"}, {"file_id": file_id}):
        content: Any = [{"type": "input_file", **file}, {"type": "input_text", "text": TEXT["text"]}]
        answer = client.responses.create(
            model="shapes", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=12
        )
        assert answer.output_text == text
        stored: Any = client.responses.input_items.list(answer.id).data[0]
        assert stored.content[0].type == "input_file"
        again = client.responses.create(model="shapes", input="And now?", previous_response_id=answer.id)
        assert again.usage is not None
        assert answer.usage is not None
        assert again.usage.input_tokens > answer.usage.input_tokens
    anthropic = Anthropic(base_url=app_url, api_key="unused", max_retries=0)
    source = {"type": "base64", "media_type": "application/pdf", "data": BARE}
    blocks: Any = [{"type": "document", "source": source, "title": "Pages"}, TEXT]
    message = anthropic.messages.create(
        model="shapes", messages=[{"role": "user", "content": blocks}], max_tokens=12, extra_body={"temperature": 0}
    )
    assert "".join(block.text for block in message.content if block.type == "text") == text
    counted = anthropic.messages.count_tokens(model="shapes", messages=[{"role": "user", "content": blocks}])
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_pages_are_embedded_and_rendered(app_url: str) -> None:
    pages = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in pages_of(PDF, 4)]
    file = {"type": "file", "file": {"file_data": PDF_URL}}
    found, expected = (
        httpx.post(f"{app_url}/v1/embeddings", json={"input": {"content": content}}, timeout=60).json()
        for content in ([file], pages)
    )
    assert found["data"] == expected["data"]
    found, expected = (
        httpx.post(f"{app_url}/render", json={"messages": [{"role": "user", "content": content}]}, timeout=60).json()
        for content in ([file], pages)
    )
    assert found["items"] == expected["items"]
    assert len(found["items"]) == 2
    assert found["prompt_token_ids"] == expected["prompt_token_ids"]


@pytest.mark.parametrize(
    ("file", "code", "field"),
    [
        ({"file_data": data_url(pdf_of(*[page("red")] * 5), "application/pdf")}, "too_many_items", ""),
        ({"file_data": data_url(b"no PDF", "application/pdf")}, "invalid_document", ""),
        ({"file_data": "!"}, "invalid_base64", ""),
        ({"file_id": "file-unknown"}, "file_not_found", ""),
        ({"filename": "a.pdf"}, "invalid_value", ""),
        ({"file_data": 3}, "invalid_value", ".file.file_data"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_are_named(client: OpenAI, file: dict[str, Any], code: str, field: str) -> None:
    with pytest.raises(APIStatusError) as caught:
        chat(client, TEXT, {"type": "file", "file": file})
    assert caught.value.code == code  # a file that is not there is a 404
    assert str(caught.value.param).startswith(f"messages[0].content[1]{field}")
