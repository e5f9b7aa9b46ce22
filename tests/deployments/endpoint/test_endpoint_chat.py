"""Chat completions beyond one plain answer: several, scored ones, pictures in every form that clients send."""

import base64
import math
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from safetensors.torch import save

from raylens.preprocess.data_url import data_url
from tests.pictures import disc, encoded, user_message

RED = encoded(disc("red", (96, 96), (36, 36)))
BLUE = encoded(disc("blue", (96, 96), (36, 36)))
QUESTION = "What colour is the circle?"


def ask(client: OpenAI, *parts: dict[str, Any], **options: Any) -> Any:
    content = [*parts, {"type": "text", "text": QUESTION}]
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="shapes", messages=messages, **options)


def test_several_answers_to_one_prompt(client: OpenAI) -> None:
    # Kept from the end that it would make, the model is sure of nothing.
    options: Any = {"temperature": 2.0, "max_tokens": 40, "extra_body": {"min_tokens": 40}}
    messages: Any = [user_message("Hello", RED)]
    whole = client.chat.completions.create(model="shapes", messages=messages, n=4, seed=3, **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in whole.choices}) == 4
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4 * 40

    events = client.chat.completions.create(model="shapes", messages=messages, n=4, seed=3, stream=True, **options)
    texts, reasons = [""] * 4, list[tuple[int, str]]()
    for event in events:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [(choice.index, choice.finish_reason)] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(reasons) == [(index, "length") for index in range(4)]


def test_log_probabilities_name_tokens_by_text_and_bytes(client: OpenAI) -> None:
    options: Any = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    answer = ask(client, **options)
    content = answer.choices[0].logprobs.content
    assert len(content) == 6
    for token in content:
        assert token.token == bytes(token.bytes).decode()
        assert [one.logprob for one in token.top_logprobs] == sorted(
            (o.logprob for o in token.top_logprobs), reverse=True
        )
        assert token.top_logprobs[0].token == token.token, "greedy"
        assert token.logprob <= 0
    assert sum(math.exp(one.logprob) for one in content[0].top_logprobs) <= 1 + 1e-6
    text = "".join(token.token for token in content).lstrip()
    assert text.startswith(answer.choices[0].message.content.split("</s>")[0].strip())
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert ask(client).choices[0].logprobs is None

    streamed = [
        token
        for event in ask(
            client, logprobs=True, top_logprobs=3, max_tokens=6, stream=True, extra_body={"ignore_eos": True}
        )
        for choice in event.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in content]


def test_a_picture_in_every_form(client: OpenAI, shapes: str) -> None:
    url = data_url(RED)
    uploaded = client.files.create(file=("red.png", RED), purpose="vision")
    forms: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": f"upload:{uploaded.id}"}},
        {"type": "input_image", "image_url": url, "detail": "low"},
        {"type": "input_image", "file_id": uploaded.id},
        {"type": "input_image", "image_url": url, "uuid": "red picture"},
        {"type": "input_image", "uuid": "red picture"},
        {"type": "image_embeds", "image_embeds": base64.b64encode(processed(shapes, RED)).decode()},
    ]
    assert [ask(client, form).choices[0].message.content for form in forms] == ["red"] * len(forms)
    client.files.delete(uploaded.id)


def test_local_files_below_the_one_folder(client: OpenAI) -> None:
    def about(url: str) -> Any:
        return ask(client, {"type": "image_url", "image_url": {"url": url}})

    assert about("file:one.png").usage.prompt_tokens > 40
    for url, code in (
        ("file:../../README.md", "media_url_forbidden"),
        ("file:///etc/passwd", "media_url_forbidden"),
        ("file:missing.png", "media_fetch_failed"),
    ):
        with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\].image_url") as caught:
            about(url)
        assert caught.value.code == code


def processed(model: str, picture: bytes) -> bytes:
    """The picture as the model's processor leaves it, as a client would send it."""
    from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig

    _, tensors = MultiModalProcessor(ProcessorConfig(model, image_backend="auto")).items.process("image", picture)
    size = torch.tensor([96, 96])
    return save({**{name: tensor.contiguous() for name, tensor in tensors.items()}, "size": size})


def test_a_long_conversation_can_be_cut_from_the_left(client: OpenAI) -> None:
    messages: Any = [
        user_message(QUESTION, BLUE),
        {"role": "assistant", "content": "blue"},
        user_message("word " * 40 + QUESTION, RED),
    ]
    body = {"return_token_ids": True}
    whole = client.chat.completions.create(model="shapes", messages=messages, extra_body=body).model_extra
    assert whole is not None
    ids = whole["prompt_token_ids"]
    picture = ids[ids.index(3) : ids.index(3) + 36]
    assert picture == [3] * 36, "the bundled model's placeholder"
    # Into the first picture, which goes whole; its neighbour and the question stay.
    limit = len(ids) - ids.index(3) - 10
    body = {"return_token_ids": True, "truncate_prompt_tokens": limit}
    cut = client.chat.completions.create(model="shapes", messages=messages, extra_body=body)
    assert cut.choices[0].message.content == "red"
    assert cut.model_extra is not None
    assert cut.model_extra["prompt_token_ids"] == ids[ids.index(3) + 36 :]


def test_requests_are_told_by_the_id_that_their_clients_see(client: OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model="shapes", messages=[user_message("Hi")], extra_headers={"x-request-id": "my-own-id"}
    )
    assert answer.headers["x-request-id"] == "my-own-id"
    assert answer.parse().id == "chatcmpl-my-own-id"
    named_badly = client.chat.completions.with_raw_response.create(
        model="shapes", messages=[user_message("Hi")], extra_headers={"x-request-id": "a b <script>" * 9}
    )
    assert "script" not in named_badly.parse().id
