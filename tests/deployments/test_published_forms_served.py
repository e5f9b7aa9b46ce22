"""Checkpoints in forms that people publish, over HTTP: greedy tokens equal those of `generate` over their numbers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from raylens.deployments.config import AppConfig
from tests.exact_answers import ask, tokens_of
from tests.family_oracle import FamilyOracle
from tests.preprocess.parity import picture
from tests.published_forms import publish
from tests.small_models import make_checkpoint

MODELS = {"awq": "awq", "w4a16": "compressed-tensors, W4A16"}
QUESTIONS: list[tuple[str, list[int]]] = [("What?", [0]), ("What?", [1]), ("And these?", [2, 3]), ("Hello", [])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """By model: the quantized checkpoint, and one of the same numbers in float32."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    plain = make_checkpoint("llava", tmp_path_factory.mktemp("plain"), sizes)
    return {
        model: publish(
            form, plain, tmp_path_factory.mktemp(model), lambda name: "language_model" in name and "_proj" in name
        )
        for model, form in MODELS.items()
    }


@pytest.fixture(scope="module")
def app_config(folders: dict[str, tuple[str, str]]) -> AppConfig:
    first, second = (
        {"model": quantized, "served_model_name": model, "preprocess": {"max_replicas": 1}}
        for model, (quantized, _) in folders.items()
    )
    return AppConfig.model_validate({**first, "further_models": [second]})


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_of_the_same_numbers_in_float32(
    model: str, folders: dict[str, tuple[str, str]], client: OpenAI
) -> None:
    def tokens(text: str, indices: list[int]) -> tuple[list[int], list[int]]:
        return tokens_of(ask(client, text, [picture(index) for index in indices], model))

    oracle = FamilyOracle("llava", folders[model][1])
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = list(pool.map(lambda question: tokens(*question), QUESTIONS))
    expected = [oracle.expected(text, [picture(index) for index in pictures]) for text, pictures in QUESTIONS]
    assert answers == expected
