"""LoRA adapters over HTTP: each answers as transformers' `generate` does with its weights merged in."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import APIStatusError, InternalServerError, NotFoundError, OpenAI
from transformers import AutoProcessor, LlavaForConditionalGeneration

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import deployed_app
from tests.adapters import merge_adapter, save_adapter
from tests.generate_oracle import Oracle, generate_oracle
from tests.pictures import disc, encoded, user_message

NUM_TOKENS = 12
QUESTIONS = [("Describe the picture.", ["red"]), ("Who are you?", []), ("Where is the circle?", ["orange"])]


def whole(shapes: str) -> LlavaForConditionalGeneration:
    return LlavaForConditionalGeneration.from_pretrained(shapes, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def spare(shapes: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that are not served yet."""
    folder = tmp_path_factory.mktemp("spare")
    save_adapter(folder / "first", whole(shapes), seed=1, spread=2)
    save_adapter(folder / "second", whole(shapes), seed=2, rank=8, use_rslora=True, spread=2)
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj": 5},
        "alpha_pattern": {r"layers\.[01]\.mlp\.\w+": 20, "q_proj": 1},
    }
    save_adapter(folder / "third", whole(shapes), seed=3, rank=2, spread=2, **patterns)
    return folder


@pytest.fixture(scope="module")
def served(spare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `adapters_folder` names."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("first", "second"):
        shutil.copytree(spare / name, folder / name)
    shutil.copytree(spare / "first", folder / ".hidden")
    (folder / "not an adapter").mkdir()
    return folder


@pytest.fixture(scope="module")
def client(shapes: str, served: Path, ray_port: int) -> Iterator[OpenAI]:
    generate = {"engine": {"max_loras": 2, "max_lora_rank": 8}, "adapters_folder": str(served)}
    config = AppConfig.model_validate({"model": shapes, "dtype": "float32", "generate": generate})
    with deployed_app(config, host="127.0.0.1", port=ray_port) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def oracles(shapes: str, spare: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    """By model."""
    oracles = {"shapes": generate_oracle(shapes, NUM_TOKENS)}
    for folder in spare.iterdir():
        merged = tmp_path_factory.mktemp("merged")
        merge_adapter(whole(shapes), folder).save_pretrained(merged)
        AutoProcessor.from_pretrained(shapes).save_pretrained(merged)
        oracles[folder.name] = generate_oracle(str(merged), NUM_TOKENS)
    return oracles


def ask(client: OpenAI, model: str, text: str, colours: list[str]) -> Any:
    pictures = [encoded(disc(colour, (96, 96), (36, 36))) for colour in colours]
    return client.chat.completions.create(
        model=model,
        messages=[user_message(text, *pictures)],
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )


def assert_right(completion: Any, oracles: dict[str, Oracle], model: str, colours: list[str]) -> None:
    assert completion.model == model
    expected = oracles[model](completion.prompt_token_ids, colours)
    assert completion.choices[0].token_ids == expected
    if model != "shapes":
        assert expected != oracles["shapes"](completion.prompt_token_ids, colours), "the adapter must matter"


def wait_for_model(client: OpenAI, name: str) -> None:
    deadline = time.monotonic() + 10
    while name not in [model.id for model in client.models.list()]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def refusal(client: OpenAI, model: str) -> APIStatusError:
    with pytest.raises(APIStatusError) as refused:
        ask(client, model, *QUESTIONS[1])
    return refused.value


def test_adapters_and_their_model_answer_at_once_like_generate(client: OpenAI, oracles: dict[str, Oracle]) -> None:
    asked = [(model, *question) for question in QUESTIONS for model in ("first", "shapes", "second")]
    for _ in range(2):  # the second time from the caches
        with ThreadPoolExecutor(len(asked)) as pool:
            completions = list(pool.map(lambda one: ask(client, *one), asked))
        for completion, (model, _, colours) in zip(completions, asked, strict=True):
            assert_right(completion, oracles, model, colours)


def test_models_are_listed_with_their_parent(client: OpenAI) -> None:
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert list(listed) == ["shapes", "first", "second"]
    assert [model["parent"] for model in listed.values()] == [None, "shapes", "shapes"]
    assert [model["root"] for model in listed.values()] == ["shapes", "first", "second"]
    assert client.models.retrieve("second").model_dump() == listed["second"]
    assert listed["first"]["max_model_len"] == listed["shapes"]["max_model_len"]


@pytest.mark.parametrize("name", ["third", ".hidden", "not an adapter", "..", "../adapters/first", "first/", ""])
def test_other_names_are_not_found(client: OpenAI, name: str) -> None:
    error = refusal(client, name)
    assert isinstance(error, NotFoundError)
    assert error.code == "model_not_found"


def test_a_new_adapter_is_served_and_more_than_have_room_answer_in_turn(
    client: OpenAI, served: Path, spare: Path, oracles: dict[str, Oracle]
) -> None:
    shutil.copytree(spare / "third", served / "third")
    wait_for_model(client, "third")
    asked = [(model, *question) for question in QUESTIONS for model in ("first", "second", "third", "shapes")]
    with ThreadPoolExecutor(len(asked)) as pool:
        completions = list(pool.map(lambda one: ask(client, *one), asked))
    for completion, (model, _, colours) in zip(completions, asked, strict=True):
        assert_right(completion, oracles, model, colours)


def test_an_adapter_that_cannot_be_served_is_not_listed_and_its_404_says_why(
    client: OpenAI, shapes: str, served: Path
) -> None:
    save_adapter(served / "dora", whole(shapes), seed=4, use_dora=True)
    deadline = time.monotonic() + 10
    while "is not served here" in str(error := refusal(client, "dora")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (error.status_code, error.code) == (404, "model_not_found")
    assert "adapter 'dora' cannot be served: adapter_config.json: use_dora is True, only False is" in str(error)
    assert str(served) not in str(error)
    assert "dora" not in [model.id for model in client.models.list()]
    save_adapter(served / "mended", whole(shapes), seed=4)
    shutil.rmtree(served / "dora")
    (served / "mended").rename(served / "dora")
    wait_for_model(client, "dora")
    ask(client, "dora", *QUESTIONS[1])


def test_a_broken_adapter_is_named_and_others_go_on(
    client: OpenAI, shapes: str, served: Path, oracles: dict[str, Oracle]
) -> None:
    """Its weights are no numbers, which only reading them shows."""
    save_adapter(served / "broken", whole(shapes), seed=4, spread=float("nan"))
    wait_for_model(client, "broken")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask, client, "first", *QUESTIONS[0])
        error = refusal(client, "broken")
    assert isinstance(error, InternalServerError)
    assert error.code == "adapter_failed"
    assert "adapter 'broken': adapter_model.safetensors: lora_A or lora_B of 'layers." in str(error)
    assert "numbers that are not finite" in str(error)
    assert str(served) not in str(error)
    assert_right(other.result(), oracles, "first", QUESTIONS[0][1])


def test_a_changed_adapter_answers_anew_and_one_that_has_gone_is_not_found(
    client: OpenAI, served: Path, spare: Path, oracles: dict[str, Oracle]
) -> None:
    shutil.copytree(spare / "first", served / "changing")
    wait_for_model(client, "changing")
    text, colours = QUESTIONS[1]
    for name in ("first", "second"):
        shutil.rmtree(served / "changing")
        shutil.copytree(spare / name, served / "changing")
        wait_for_model(client, "changing")
        completion = ask(client, "changing", text, colours)
        assert completion.choices[0].token_ids == oracles[name](completion.prompt_token_ids, colours)
    shutil.rmtree(served / "changing")
    assert isinstance(refusal(client, "changing"), NotFoundError)
