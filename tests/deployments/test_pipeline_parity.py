"""Greedy tokens that come over HTTP equal those of transformers' `generate` on the same checkpoint."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI
from transformers import AutoProcessor

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import deployed_app
from tests.generate_oracle import Oracle, generate_oracle
from tests.pictures import disc, encoded, user_message

NUM_TOKENS = 24
QUESTIONS = [
    ("Describe the picture.", ["red"]),
    ("What is in the second image?", ["green", "blue", "yellow"]),
    ("Who are you?", []),
    ("What is in the third image?", ["blue", "purple", "blue"]),
    ("Where is the circle?", ["orange"]),
    ("Hello <image> </s>, what is this?", []),
]


@pytest.fixture(
    scope="module", params=[7, pytest.param(512, marks=pytest.mark.slow)], ids=lambda budget: f"budget_{budget}"
)
def client(request: pytest.FixtureRequest, shapes: str, ray_port: int) -> Iterator[OpenAI]:
    generate = {"engine": {"max_num_batched_tokens": request.param, "max_num_seqs": 7}}
    config = AppConfig.model_validate({"model": shapes, "generate": generate})
    with deployed_app(config, host="127.0.0.1", port=ray_port) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def oracle(shapes: str) -> Oracle:
    return generate_oracle(shapes, NUM_TOKENS)


@pytest.fixture(scope="module")
def hf_prompt(shapes: str) -> Any:
    """The prompt ids of the one-shot call of the Hugging Face processor."""
    processor = AutoProcessor.from_pretrained(shapes)

    def ids(text: str, colours: list[str]) -> list[int]:
        content = [{"type": "image"}] * len(colours) + [{"type": "text", "text": text}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        images = [disc(colour, (96, 96), (36, 36)) for colour in colours]
        return processor(text=prompt, images=images or None)["input_ids"][0]  # type: ignore[no-any-return]

    return ids


def ask(client: OpenAI, text: str, colours: list[str]) -> Any:
    pictures = [encoded(disc(colour, (96, 96), (36, 36))) for colour in colours]
    return client.chat.completions.create(
        model="shapes",
        messages=[user_message(text, *pictures)],
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )


@pytest.mark.parametrize(("text", "colours"), QUESTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_each_alone(client: OpenAI, oracle: Oracle, hf_prompt: Any, text: str, colours: list[str]) -> None:
    completion = ask(client, text, colours)
    if "<image>" not in text:
        assert completion.prompt_token_ids == hf_prompt(text, colours)
    assert completion.choices[0].token_ids == oracle(completion.prompt_token_ids, colours)


def test_a_mixed_batch(client: OpenAI, oracle: Oracle) -> None:
    requests = QUESTIONS * 2
    with ThreadPoolExecutor(len(requests)) as pool:
        completions = list(pool.map(lambda request: ask(client, *request), requests))
    answers = [completion.choices[0].token_ids for completion in completions]
    expected = [
        oracle(completion.prompt_token_ids, colours)
        for completion, (_, colours) in zip(completions, requests, strict=True)
    ]
    assert answers == expected
    assert len({tuple(answer) for answer in expected}) >= 4, "answers must depend on the input"
