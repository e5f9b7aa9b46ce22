"""Two models of different families behind one endpoint: each answers as it does alone, and when the other is away."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from raylens.deployments.config import AppConfig
from tests.background import Background
from tests.family_oracle import FamilyOracle
from tests.generate_oracle import Oracle, generate_oracle
from tests.pictures import disc, encoded, user_message
from tests.replicas import replica_pids
from tests.small_models import NUM_TOKENS, make_checkpoint
from tests.waiting import wait_until

SECOND = "small/qwen"  # a name that Ray Serve's log files could not have
QUESTIONS: list[tuple[str, list[str]]] = [
    ("What colour is the circle?", ["red"]),
    ("What colour is the circle?", ["blue"]),
    ("And these?", ["green", "red"]),
    ("Hello", []),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def app_config(shapes: str, checkpoint: str) -> AppConfig:
    one = {"preprocess": {"max_replicas": 1}}
    return AppConfig.model_validate(
        {
            "model": shapes,
            "ingress": {"away_timeout_s": 1},
            **one,
            "further_models": [{"model": checkpoint, "served_model_name": SECOND, **one}],
        }
    )


@pytest.fixture(scope="module")
def keeps_app_as_it_is() -> bool:
    return False


@pytest.fixture(scope="module")
def first_oracle(shapes: str) -> Oracle:
    return generate_oracle(shapes, NUM_TOKENS)


@pytest.fixture(scope="module")
def second_oracle(checkpoint: str) -> FamilyOracle:
    return FamilyOracle("qwen3_vl", checkpoint)


def ask(client: OpenAI, model: str, text: str, colours: list[str]) -> Any:
    pictures = [encoded(disc(colour, (96, 96), (36, 36))) for colour in colours]
    return client.chat.completions.create(
        model=model,
        messages=[user_message(text, *pictures)],
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True, "stage_timings": True},
    )


def colour_of(client: OpenAI) -> str:
    return str(ask(client, "shapes", "What colour is the circle?", ["red"]).choices[0].message.content.split()[0])


def test_both_answer_at_once_as_each_does_alone(
    client: OpenAI, first_oracle: Oracle, second_oracle: FamilyOracle
) -> None:
    """Also the same question about the same picture."""
    asked = [(model, *question) for question in QUESTIONS for model in ("shapes", SECOND)]
    with ThreadPoolExecutor(len(asked)) as pool:
        completions = list(pool.map(lambda one: ask(client, *one), asked))
    for (model, text, colours), completion in zip(asked, completions, strict=True):
        answer = completion.choices[0].token_ids
        assert completion.model == model
        if model == "shapes":
            assert answer == first_oracle(completion.prompt_token_ids, colours)
        else:
            pictures = [disc(colour, (96, 96), (36, 36)) for colour in colours]
            assert (completion.prompt_token_ids, answer) == second_oracle.expected(text, pictures)
    assert len({tuple(one.choices[0].token_ids) for one in completions}) == len(asked), "answers depend on the input"


def test_each_finds_its_own_embeddings_of_a_picture(client: OpenAI) -> None:
    first, again = (
        [ask(client, model, "What colour is the circle?", ["purple"]).stage_timings for model in ("shapes", SECOND)]
        for _ in range(2)
    )
    assert [one["embedding_cache_hits"] for one in first + again] == [0, 0, 1, 1]


def test_a_name_that_a_client_gave_to_a_picture_stands_for_it_with_either_model(client: OpenAI) -> None:
    for model in ("shapes", SECOND):  # each has to see it once
        message = user_message("What colour is the circle?", encoded(disc("green", (96, 96), (36, 36))))
        message["content"][0]["uuid"] = "my picture"
        client.chat.completions.create(model=model, messages=[message], max_tokens=1)
    message["content"][0] = {"type": "image_url", "uuid": "my picture"}
    for model in ("shapes", SECOND):
        client.chat.completions.create(model=model, messages=[message], max_tokens=1)


def test_all_models_are_listed(client: OpenAI) -> None:
    first, second = client.models.list().data
    assert (first.id, second.id) == ("shapes", SECOND)
    told: list[Any] = [client.models.retrieve(name) for name in ("shapes", SECOND)]
    assert told == [first, second]
    assert (told[0].modalities, told[1].modalities) == (["image"], ["image", "video"])
    assert told[0].max_model_len != told[1].max_model_len


def test_another_name_is_refused_with_those_that_are_served(client: OpenAI, app_url: str) -> None:
    asks: list[Callable[[], object]] = [
        lambda: ask(client, "nobody", "Hello", []),
        lambda: client.completions.create(model="nobody", prompt="Hello"),
        lambda: client.responses.create(model="nobody", input="Hello"),
        lambda: client.models.retrieve("nobody"),
    ]
    for one in asks:
        with pytest.raises(NotFoundError, match="'nobody' is not served here, only 'shapes', 'small/qwen'") as caught:
            one()
        assert caught.value.code == "model_not_found"
    assert httpx.post(f"{app_url}/tokenize", json={"model": "nobody", "prompt": "Hello"}).status_code == 404


def test_every_route_reaches_either_model(client: OpenAI, app_url: str) -> None:
    found = []
    for model in ("shapes", SECOND):
        fields = {"model": model, "prompt": "Hello there"}
        tokenized = httpx.post(f"{app_url}/tokenize", json=fields).json()
        text = httpx.post(f"{app_url}/detokenize", json={"model": model, "tokens": tokenized["tokens"]}).json()
        assert "Hello there" in text["prompt"]
        rendered = httpx.post(f"{app_url}/render", json={"model": model, "messages": [user_message("Hello")]})
        completion = client.completions.create(model=model, prompt="Hello there", temperature=0, max_tokens=8)
        response = client.responses.create(model=model, input="Hello there", temperature=0, max_output_tokens=8)
        found.append((tokenized, rendered.json(), completion.choices[0].text, response.output_text))
    assert all(one != two for one, two in zip(*found, strict=True))


def test_where_a_request_need_not_name_its_model_the_first_one_is_meant(app_url: str) -> None:
    unnamed, first, second = (
        httpx.post(f"{app_url}/tokenize", json={"prompt": "Hello there", **model}).json()
        for model in ({}, {"model": "shapes"}, {"model": SECOND})
    )
    assert unnamed == first != second


def test_health_tells_of_the_stages_of_both(app_url: str) -> None:
    body = httpx.get(f"{app_url}/health").json()
    stages = {"preprocess", "encode", "generate"}
    assert body["ready"] is True
    assert set(body["stages"]) == {"shared", *stages, *(f"{stage}-small%2Fqwen" for stage in stages)}
    assert set(body["details"]) == {"encode", "generate", "encode-small%2Fqwen", "generate-small%2Fqwen"}


class Asking(Background):
    """A client of one model that asks on and on. `wrong`: what it was not told that it should have been."""

    def __init__(self, client: OpenAI) -> None:
        super().__init__(self._run)
        self._client = client
        self.num_answers = 0
        self.wrong: list[str] = []

    def _run(self) -> None:
        while not self.is_over.is_set():
            try:
                answer = ask(self._client, SECOND, "Hello", []).choices[0].token_ids
            except Exception as error:
                self.wrong.append(repr(error))
            else:
                self.num_answers += len(answer) == NUM_TOKENS


@pytest.mark.slow
def test_when_a_model_s_stage_is_away_the_other_one_answers(client: OpenAI, app_url: str) -> None:
    (pid,), (other,) = replica_pids("Generate"), replica_pids("Generate-small%2Fqwen")
    body = {"model": "shapes", "prompt": "Hello", "max_tokens": 1}
    with Asking(client) as asking:
        os.kill(pid, signal.SIGSTOP)
        try:
            refusal = httpx.post(f"{app_url}/v1/completions", json=body, timeout=30)
            health = httpx.get(f"{app_url}/health").json()
            num_answers = asking.num_answers
            wait_until(lambda: asking.num_answers > num_answers + 3)
        finally:
            os.kill(pid, signal.SIGKILL)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "stage_unavailable")
        assert health["ready"] is False
        assert [name for name, state in health["stages"].items() if state != "ready"] == ["generate"]
        wait_until(lambda: httpx.get(f"{app_url}/health").status_code == 200, 60)
        assert httpx.post(f"{app_url}/v1/completions", json=body, timeout=30).status_code == 200
    assert asking.wrong == []
    assert replica_pids("Generate") != [pid]
    assert replica_pids("Generate-small%2Fqwen") == [other]
