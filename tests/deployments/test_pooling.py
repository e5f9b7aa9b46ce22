"""Embeddings, ranks and scores over HTTP equal those of the libraries, which equal transformers' (`tests/pooling`)."""

import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from openai import OpenAI
from PIL import Image

from raylens.deployments.config import AppConfig
from raylens.preprocess.data_url import data_url
from raylens.preprocess.schema import PooledPrompt
from tests.metric_values import exported
from tests.pictures import encoded
from tests.pooling.checkpoints import INSTRUCTION, classifier, embedding_model, reranker
from tests.pooling.in_process import PICTURE, Given, InProcess, text
from tests.preprocess.parity import picture
from tests.small_models import make_checkpoint

MODULES: list[tuple[str, dict[str, Any]]] = [
    ("Pooling", {"embedding_dimension": 32, "pooling_mode": "lasttoken"}),
    ("Normalize", {}),
]
QUERY = "Which page has the total?"
DOCUMENTS = ["a page of text", "the total is 12", "é"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        "embedder": embedding_model(tmp_path_factory.mktemp("embedder"), MODULES),
        "late": make_checkpoint("colqwen2", tmp_path_factory.mktemp("late")),
        "reranker": reranker(tmp_path_factory.mktemp("reranker")),
        "classifier": classifier(tmp_path_factory.mktemp("classifier")),
    }


@pytest.fixture(scope="module")
def app_config(checkpoints: dict[str, str]) -> AppConfig:
    one: dict[str, Any] = {"preprocess": {"max_replicas": 1, "num_cpus": 0.5}}
    first, *others = ({"model": path, "served_model_name": name, **one} for name, path in checkpoints.items())
    for other in others:
        other["encode"] = {"placement": "inline"}
    return AppConfig.model_validate({**first, "further_models": others, "media": {"limits": {"max_items": 4}}})


@pytest.fixture(scope="module")
def libraries(checkpoints: dict[str, str]) -> Callable[[str], InProcess]:
    made: dict[str, InProcess] = {}

    def of(name: str) -> InProcess:
        if name not in made:
            made[name] = InProcess(checkpoints[name])
        return made[name]

    return of


def url_of(image: Image.Image) -> str:
    return data_url(encoded(image))


def image_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(image)}}


def post(app_url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{app_url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(app_url: str, path: str, **body: Any) -> tuple[str, str]:
    answer = httpx.post(f"{app_url}{path}", json=body, timeout=60)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def close(found: Any, expected: npt.NDArray[Any]) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-5, atol=1e-5)


def test_texts_by_the_official_client(client: OpenAI, libraries: Callable[[str], InProcess]) -> None:
    given: list[Given] = [(PooledPrompt([text(one)]), []) for one in DOCUMENTS]
    expected = libraries("embedder").pool(*given)
    # The client itself asks for base64.
    answer = client.embeddings.create(model="embedder", input=DOCUMENTS)
    assert [one.index for one in answer.data] == [0, 1, 2]
    for one, rows in zip(answer.data, expected, strict=True):
        close(one.embedding, rows[0])
    plain = client.embeddings.create(model="embedder", input=DOCUMENTS[0], encoding_format="float")
    close(plain.data[0].embedding, expected[0][0])
    assert plain.usage.prompt_tokens == plain.usage.total_tokens < answer.usage.prompt_tokens
    short = client.embeddings.create(model="embedder", input=DOCUMENTS[0], dimensions=5)
    head = expected[0][0][:5]
    close(short.data[0].embedding, head / np.linalg.norm(head))


def test_token_ids_are_taken_as_they_are(client: OpenAI, app_url: str) -> None:
    words = post(app_url, "/tokenize", model="late", prompt="Query: total", add_special_tokens=False)["tokens"]
    both = client.embeddings.create(model="late", input=[words, words[:2]], encoding_format="float")
    assert [len(one.embedding) for one in both.data] == [len(words), 2]


def test_a_picture_in_every_form(app_url: str, libraries: Callable[[str], InProcess]) -> None:
    content = [PICTURE, text("what?")]
    given: list[Given] = [(PooledPrompt([PICTURE]), [picture(0)]), (PooledPrompt(content), [picture(0)])]
    alone, with_text = libraries("embedder").pool(*given)
    bare = base64.b64encode(encoded(picture(0))).decode()
    forms: list[dict[str, Any]] = [
        {"image": url_of(picture(0))},
        {"image": bare},
        {"content": [image_part(picture(0))]},
    ]
    for form in forms:
        assert form
        close(post(app_url, "/v1/embeddings", input=form)["data"][0]["embedding"], alone[0])
    close([one["embedding"] for one in post(app_url, "/v1/embeddings", input=forms)["data"]], np.stack([alone[0]] * 3))
    close(post(app_url, "/v1/embeddings", input={**forms[0], "text": "what?"})["data"][0]["embedding"], with_text[0])
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": [image_part(picture(0)), {"type": "text", "text": "what?"}]},
    ]
    chat = post(app_url, "/v1/embeddings", messages=messages, add_generation_prompt=True)
    close(chat["data"][0]["embedding"], with_text[0])


def test_queries_and_documents_may_have_prompts_of_their_own(
    app_url: str, libraries: Callable[[str], InProcess]
) -> None:
    given: list[Given] = [
        (PooledPrompt([text("total")], purpose="query"), []),
        (PooledPrompt([text("total")], instruction="Find it."), []),
    ]
    query, own = libraries("embedder").pool(*given)
    close(post(app_url, "/v1/embeddings", input="total", input_type="search_query")["data"][0]["embedding"], query[0])
    close(post(app_url, "/v1/embeddings", input="total", instruction="Find it.")["data"][0]["embedding"], own[0])
    assert not np.allclose(query, own, atol=1e-3)


def test_a_model_with_a_vector_for_each_token(
    client: OpenAI, app_url: str, libraries: Callable[[str], InProcess]
) -> None:
    given: list[Given] = [(PooledPrompt([text(QUERY)]), []), (PooledPrompt([PICTURE]), [picture(1)])]
    query, page = libraries("late").pool(*given)
    told = post(app_url, "/v1/embeddings", model="late", input=[QUERY, {"image": url_of(picture(1))}])["data"]
    close(told[0]["embedding"], query)
    close(told[1]["embedding"], page)
    assert [one["shape"] for one in told] == [[*query.shape], [*page.shape]]
    by_client: Any = client.embeddings.create(model="late", input=QUERY).data[0]
    close(np.reshape(by_client.embedding, by_client.shape), query)
    mixed = {"content": [{"type": "text", "text": "both"}, image_part(picture(1))]}
    assert refused(app_url, "/v1/embeddings", model="late", input=mixed)[0] == "input"


PAGES = [picture(index) for index in range(3)]


def page_documents() -> list[dict[str, Any]]:
    return [{"image": url_of(one)} for one in PAGES]


def similarities(query: npt.NDArray[Any], documents: Sequence[npt.NDArray[Any]]) -> list[float]:
    return [float((query @ one.T).max(1).sum()) for one in documents]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
@pytest.mark.parametrize("model", ["embedder", "late", "reranker"])
def test_pages_and_texts_are_ranked(app_url: str, libraries: Callable[[str], InProcess], model: str, path: str) -> None:
    library = libraries(model)
    contents: list[Given] = [(PooledPrompt([text(one)]), []) for one in DOCUMENTS]
    contents += [(PooledPrompt([PICTURE]), [one]) for one in PAGES]
    if model == "reranker":
        pairs: list[Given] = [(PooledPrompt(one.content, [text(QUERY)]), pictures) for one, pictures in contents]
        expected = [1 / (1 + np.exp(-float(rows[0, 0]))) for rows in library.pool(*pairs)]
    else:
        documents: list[Given] = [(PooledPrompt(one.content, purpose="document"), images) for one, images in contents]
        query, *others = library.pool((PooledPrompt([text(QUERY)], purpose="query"), []), *documents)
        expected = similarities(query, others)
    order = sorted(range(6), key=lambda index: -expected[index])
    body = {"model": model, "query": QUERY, "documents": [*DOCUMENTS, *page_documents()]}
    results = post(app_url, path, **body)["results"]
    assert [one["index"] for one in results] == order
    close([one["relevance_score"] for one in results], np.array(expected)[order])
    assert {one["index"]: one["document"]["text"] for one in results if "document" in one} == dict(enumerate(DOCUMENTS))
    short = post(app_url, path, **body, top_n=2, return_documents=False)["results"]
    assert short == [{name: one[name] for name in ("index", "relevance_score")} for one in results[:2]]


@pytest.mark.parametrize("model", ["embedder", "reranker"])
def test_scores_of_one_query_and_of_several(app_url: str, model: str) -> None:
    ranked = post(app_url, "/v1/rerank", model=model, query=QUERY, documents=DOCUMENTS)["results"]
    expected = [one["relevance_score"] for one in sorted(ranked, key=lambda one: one["index"])]
    for names in (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")):
        for query in (QUERY, [QUERY] * 3):
            answer = post(app_url, "/v1/score", model=model, **dict(zip(names, (query, DOCUMENTS), strict=True)))
            close([one["score"] for one in answer["data"]], np.array(expected))
    alone = post(app_url, "/score", model=model, queries=[QUERY], documents=DOCUMENTS[1])["data"]
    close([alone[0]["score"]], np.array(expected[1:2]))
    pages = {"content": [image_part(one) for one in PAGES]}
    by_page = post(app_url, "/v1/rerank", model=model, query=QUERY, documents=pages)["results"]
    listed = post(app_url, "/v1/rerank", model=model, query=QUERY, documents=page_documents())["results"]
    assert by_page == listed


def test_fifty_pages_are_encoded_once(app_url: str) -> None:
    """In the first ranking; another query and another model of the same vision encoder's caches find them."""
    pages = [Image.effect_noise((64, 64), 20.0 + index).convert("RGB") for index in range(50)]
    documents = [{"image": url_of(one)} for one in (*pages, *pages[:10])]
    before = exported(app_url, "encoder_items")
    first = post(app_url, "/v1/rerank", model="reranker", query=QUERY, documents=documents)["results"]
    assert exported(app_url, "encoder_items") - before == 50
    again = post(app_url, "/v1/rerank", model="reranker", query=QUERY, documents=documents)["results"]
    other = post(app_url, "/v1/rerank", model="reranker", query="Another?", documents=documents)["results"]
    assert exported(app_url, "encoder_items") - before == 50
    assert again == first
    assert len(other) == 60
    twins = {one["index"]: one["relevance_score"] for one in first}
    close([twins[index] for index in range(10)], np.array([twins[50 + index] for index in range(10)]))


def test_a_classifier_names_the_class_and_all_probabilities(
    app_url: str, libraries: Callable[[str], InProcess]
) -> None:
    given: list[Given] = [(PooledPrompt([text(one)]), []) for one in DOCUMENTS]
    answer = post(app_url, "/classify", model="classifier", input=DOCUMENTS)
    for number, (one, logits) in enumerate(zip(answer["data"], libraries("classifier").pool(*given), strict=True)):
        weights = np.exp(logits.reshape(-1).astype(np.float64))
        close(one["probs"], weights / weights.sum())
        assert (one["index"], one["num_classes"]) == (number, 3)
        assert one["label"] == f"class {int(np.argmax(weights))}"
    assert answer["usage"]["prompt_tokens"] > 0
    conversation = [{"role": "user", "content": "a"}]
    field, message = refused(app_url, "/v1/chat/completions", model="classifier", messages=conversation)
    assert (field, "writes no text" in message) == ("model", True)


def test_many_inputs_are_no_more_requests_than_a_key_may_have(client: OpenAI) -> None:
    texts = [f"input {index}" for index in range(500)]
    answer = client.embeddings.create(model="embedder", input=texts, encoding_format="float")
    assert [one.index for one in answer.data] == list(range(500))
    alone = client.embeddings.create(model="embedder", input=texts[250], encoding_format="float")
    close(answer.data[250].embedding, np.array(alone.data[0].embedding))


def test_embedding_beside_each_other(client: OpenAI) -> None:
    expected = client.embeddings.create(model="embedder", input=DOCUMENTS, encoding_format="float").data

    def ask(number: int) -> Any:
        return client.embeddings.create(model="embedder", input=DOCUMENTS[number % 3], encoding_format="float").data[0]

    with ThreadPoolExecutor(12) as pool:
        for number, one in enumerate(pool.map(ask, range(48))):
            close(one.embedding, np.array(expected[number % 3].embedding))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"model": "reranker", "input": "a"}, "model"),
        ("/classify", {"input": "a"}, "model"),
        ("/v1/chat/completions", {"model": "late", "messages": [{"role": "user", "content": "a"}]}, "model"),
        ("/v1/completions", {"model": "late", "prompt": "a"}, "model"),
        ("/v1/embeddings", {"model": "unknown", "input": "a"}, "model"),
        ("/v1/embeddings", {}, "body"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "body"),
        ("/v1/embeddings", {"input": {"text": "a", "content": [{"type": "text", "text": "b"}]}}, "input"),
        ("/v1/embeddings", {"input": [1, 10**6]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "normalize": False}, "normalize"),
        ("/v1/embeddings", {"input": "a b " * 9000}, "input"),
        ("/v1/embeddings", {"input": {"image": "!"}}, "input.image"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"image": "QUI="}]}, "documents[1].image"),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "documents"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_mistakes_are_named(app_url: str, path: str, body: dict[str, Any], field: str) -> None:
    param, message = refused(app_url, path, **body)
    assert param.startswith(field), message
