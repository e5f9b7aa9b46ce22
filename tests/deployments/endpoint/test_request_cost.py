"""What requests cost, before anything of them is decoded."""

from typing import Any

import pytest
from PIL import Image

from raylens.deployments.api.prompt_fields import MediaFields
from raylens.deployments.config import AdmissionConfig
from raylens.deployments.endpoint.admission import Admission
from raylens.deployments.endpoint.api_keys import Caller
from raylens.deployments.endpoint.call import ApiCall
from raylens.deployments.endpoint.request_cost import RequestCost, cost_of
from raylens.deployments.endpoint.served_models import ModelRoute
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.data_url import data_url
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.schema import ChatPrompt, InterleavedPrompt, Prompt, TextPrompt, TokensPrompt
from tests.pictures import encoded

LIMITS = MediaLimits()
MAX_MODEL_LEN = 4096
TOOL = {"function": {"name": "f", "parameters": {"x" * 4000: {}}}}


def route(adds_all_images: bool = True) -> ModelRoute:
    nothing: Any = None
    return ModelRoute("m", "", nothing, nothing, LIMITS, adds_all_images)


def admission() -> Admission:
    return Admission(AdmissionConfig(), lambda reason: None)


def cost(
    prompt: Prompt, *urls: str, modality: str = "image", is_precomputed: bool = False, **params: Any
) -> RequestCost:
    media = [MediaSource(url, "f", modality, is_precomputed) for url in urls]
    with admission().ticket(Caller(None, "salt")) as ticket:
        request = route().request(ApiCall("id", ticket), "r", MediaFields(), SamplingParams(**params), (prompt, media))
    return cost_of([request], MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (TextPrompt("x" * 400), 100),
        (TokensPrompt([1] * 100), 100),
        (InterleavedPrompt(["x" * 200, None, "x" * 200]), 100),
        (ChatPrompt([{"role": "user", "content": [{"type": "text", "text": "x" * 4000}]}]), 1006),
        (ChatPrompt([{"role": "user", "content": []}], [TOOL]), 1012),
    ],
)
def test_tokens_of_prompt_and_answers(prompt: Prompt, tokens: int) -> None:
    assert cost(prompt, max_tokens=10, n=3).tokens == pytest.approx(tokens + 30, abs=8)
    assert cost(prompt).tokens == pytest.approx(tokens + 1024, abs=8)


def test_an_answer_is_at_most_as_long_as_the_context() -> None:
    for number in (MAX_MODEL_LEN, 10**9, 10**30):
        assert cost(TextPrompt("x" * 400), max_tokens=number, n=2).tokens == 100 + 2 * MAX_MODEL_LEN


def test_log_probabilities_cost_by_their_number() -> None:
    prompt = TextPrompt("x" * 400)
    assert cost(prompt, max_tokens=10, n=3, logprobs=20).tokens == 100 + 30 * 6
    assert cost(prompt, max_tokens=10, logprobs=0).tokens == 110
    assert cost(prompt, max_tokens=10, prompt_logprobs=4).tokens == 200 + 10


def test_pixels_by_the_header_of_what_is_in_the_body() -> None:
    picture, other = encoded(Image.new("RGB", (300, 200)), "JPEG"), encoded(Image.new("RGB", (30, 20)), "JPEG")
    assert cost(TextPrompt(""), data_url(picture), data_url(other)).pixels == 60_000 + 600
    assert cost(TextPrompt(""), data_url(picture), data_url(picture)).pixels == 60_000, "is made once"
    assert cost(TextPrompt(""), data_url(picture), is_precomputed=True).pixels == 0
    assert cost(TextPrompt(""), "https://example.com/a.jpg").pixels == 0, "counts when it has been fetched"
    assert cost(TextPrompt(""), "data:image/png;base64,@@@").pixels == 0, "is refused when it is loaded"
    assert cost(TextPrompt(""), data_url(b"\0" * 1000), modality="video").pixels == 16_000
    unknown = data_url(b"\0" * 2_000_000)
    assert cost(TextPrompt(""), unknown).pixels == pytest.approx(2_000_000, rel=0.001), "as many as its bytes"


@pytest.mark.parametrize("num_segments", [1, 60])
def test_a_size_that_is_hidden_behind_metadata_is_found_or_taken_for_the_largest(num_segments: int) -> None:
    picture = encoded(Image.new("RGB", (300, 200)), "JPEG")
    segment = b"\xff\xe1\xff\xff" + b"\0" * 65533
    hidden = picture[:2] + segment * num_segments + picture[2:]
    is_seen = len(hidden) < 3 * 2**20
    assert cost(TextPrompt(""), data_url(hidden)).pixels == (60_000 if is_seen else LIMITS.max_image_pixels)


def test_what_is_fetched_is_taken_of_the_callers_budgets() -> None:
    with admission().ticket(Caller(None, "salt")) as ticket:
        source = MediaSource("https://example.com/a.jpg", "f")
        request = route().request(
            ApiCall("id", ticket), "r", MediaFields(), SamplingParams(), (TextPrompt(""), [source])
        )
        request.on_fetched(1000, 60_000)
        assert ticket.held == RequestCost(bytes=1000, pixels=60_000)


@pytest.mark.parametrize("adds_all_images", [True, False])
def test_a_request_has_all_its_pictures_or_the_last(adds_all_images: bool) -> None:
    prompt = InterleavedPrompt([None, "and", None])
    media = [MediaSource(f"https://example.com/{index}.jpg", "f") for index in range(2)]
    with admission().ticket(Caller(None, "salt")) as ticket:
        call = ApiCall("id", ticket)
        request = route(adds_all_images).request(call, "r", MediaFields(), SamplingParams(), (prompt, media))
    assert [source.url for source in request.media] == [source.url for source in media[0 if adds_all_images else 1 :]]
    assert request.prompt == (prompt if adds_all_images else InterleavedPrompt(["and", None]))
