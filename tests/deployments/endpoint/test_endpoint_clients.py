"""Clients beside the official one, as their users use them."""

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import yaml
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

from raylens.deployments.launch.demo import picture_part
from raylens.preprocess.data_url import data_url
from tests.deployments.endpoint.recorded_bodies import PLAIN, assert_is_answered
from tests.pictures import disc, encoded

RED = encoded(disc("red", (96, 96), (36, 36)))
LARGE = encoded(disc("red", (1024, 1024), (384, 384)), "BMP") + b"\0"  # so that its base64 would have padding


class Colour(BaseModel):
    """The colour of a shape."""

    name: Literal["red", "blue"]
    sure: bool


def question(text: str = "What colour is the circle?") -> HumanMessage:
    return HumanMessage([picture_part(RED), {"type": "text", "text": text}])


def chat(app_url: str, **options: Any) -> ChatOpenAI:
    key = SecretStr("unused")
    return ChatOpenAI(model="shapes", base_url=f"{app_url}/v1", api_key=key, max_retries=0, timeout=60, **options)


def test_langchain_asks_and_streams_about_a_picture(app_url: str) -> None:
    answer = chat(app_url).invoke([question()])
    assert answer.content == "red"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(chat(app_url, stream_usage=True).stream([question("Describe the picture.")]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessageChunk)
    assert whole.content == chat(app_url).invoke([question("Describe the picture.")]).content
    assert len(chunks) > 2


async def test_langchain_asks_many_at_once(app_url: str) -> None:
    answers = await chat(app_url).abatch([[question()]] * 6)
    assert [answer.content for answer in answers] == ["red"] * 6


def test_langchain_asks_for_a_form(app_url: str) -> None:
    structured = chat(app_url, max_completion_tokens=200).with_structured_output(Colour, method="json_schema")
    assert isinstance(structured.invoke([question()]), Colour)


def test_langchain_uses_the_responses_api(app_url: str) -> None:
    answer = chat(app_url, use_responses_api=True).invoke([question()])
    assert answer.text == "red"


def test_langchain_completes(app_url: str) -> None:
    key = SecretStr("unused")
    completions = OpenAI(model="shapes", base_url=f"{app_url}/v1", api_key=key, max_retries=0, max_tokens=20)
    assert completions.invoke("USER: Who are you? ASSISTANT:").strip()


def test_the_program_llm_asks_about_a_picture(app_url: str, tmp_path: Path) -> None:
    """Simon Willison's, of PyPI. Its package has the name of one of ours."""
    models = [{"model_id": "ours", "model_name": "shapes", "api_base": f"{app_url}/v1", "vision": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    (tmp_path / "picture.png").write_bytes(RED)
    asked = subprocess.run(
        [sys.executable, "-P", "-m", "llm", "-m", "ours", "-a", "picture.png", "What colour is the circle?"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": "", "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "unused"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert asked.stdout == "red\n"


@pytest.mark.parametrize("name", PLAIN)
def test_recorded_bodies_are_answered(app_url: str, name: str) -> None:
    assert_is_answered(app_url, *PLAIN[name])


URL = data_url(RED)
BARE = "data:image/bmp;base64," + base64.urlsafe_b64encode(LARGE).decode().rstrip("=")
CHAT_FORMS = {
    "original": {"type": "image_url", "image_url": {"url": URL, "detail": "original"}},
    "a plain text": {"type": "image_url", "image_url": URL},
    "no type": {"image_url": {"url": URL}},
    "no type, a plain text": {"type": None, "image_url": f" \n{URL}\n"},
    "large, bare": {"image_url": f"\n{BARE}"},
}
RESPONSES_FORMS = {
    "original": {"type": "input_image", "image_url": URL, "detail": "original"},
    "an object": {"type": "input_image", "image_url": {"url": URL, "detail": "original"}},
    "no type": {"image_url": f"\n{URL}"},
    "large, bare": {"type": "input_image", "image_url": f" {BARE}"},
}


def ask(app_url: str, path: str, *parts: Any) -> httpx.Response:
    field = "messages" if path == "chat/completions" else "input"
    body = {"model": "shapes", field: [{"role": "user", "content": [*parts, {"text": "What colour is the circle?"}]}]}
    return httpx.post(f"{app_url}/v1/{path}", json=body, timeout=60)


@pytest.mark.parametrize("form", CHAT_FORMS)
def test_a_picture_may_have_any_form_that_clients_send(app_url: str, form: str) -> None:
    response = ask(app_url, "chat/completions", CHAT_FORMS[form])
    assert response.status_code == 200, response.text[:1000]
    assert response.json()["choices"][0]["message"]["content"] == "red"


@pytest.mark.parametrize("form", RESPONSES_FORMS)
def test_a_picture_may_have_any_form_in_the_responses_api(app_url: str, form: str) -> None:
    response = ask(app_url, "responses", RESPONSES_FORMS[form])
    assert response.status_code == 200, response.text[:1000]
    assert response.json()["output"][0]["content"][0]["text"] == "red"


@pytest.mark.parametrize(
    ("path", "part", "field"),
    [
        ("chat/completions", {"image_url": "data:image/png;base64,QUI=!"}, "messages[0].content[0].image_url"),
        ("chat/completions", {"image_url": f"{BARE}="}, "messages[0].content[0].image_url"),
        ("chat/completions", {"image_url": f"{BARE}!"}, "messages[0].content[0].image_url"),
        ("chat/completions", {"video_url": " data:;base64,AAAA"}, "messages[0].content[0].video_url"),
        ("chat/completions", {"video_url": {"url": "data:;base64,AAAA"}}, "messages[0].content[0].video_url"),
        ("chat/completions", {"audio_url": " data:;base64,AAAA"}, "messages[0].content[0].audio_url"),
        ("chat/completions", {"input_audio": {"data": 3}}, "messages[0].content[0].input_audio.data"),
        ("chat/completions", {"image_url": 3}, "messages[0].content[0].image_url"),
        ("chat/completions", {"colour": "red"}, "messages[0].content[0]"),
        ("chat/completions", {"image_url": URL, "text": "both"}, "messages[0].content[0]"),
        ("responses", {"image_url": "data:image/png;base64,!"}, "input[0].content[0].input_image"),
        ("responses", {"video_url": URL}, "input[0].content[0]"),
    ],
)
def test_a_part_that_is_none_is_refused_by_its_name(app_url: str, path: str, part: Any, field: str) -> None:
    response = ask(app_url, path, part)
    assert response.status_code == 400, response.text[:1000]
    assert response.json()["error"]["param"] == field
