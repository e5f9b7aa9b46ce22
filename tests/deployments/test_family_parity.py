"""Families that ask something else of each stage, over HTTP: greedy tokens equal those of `generate`."""

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from playwright.sync_api import BrowserContext, expect
from safetensors.torch import save

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import deployed_app
from raylens.preprocess.data_url import data_url
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from tests.exact_answers import tokens_of
from tests.family_oracle import FamilyOracle
from tests.page_driver import ask, make_endless, open_page
from tests.pictures import encoded, user_message
from tests.preprocess.parity import picture
from tests.preprocess.video_parity import clip
from tests.small_models import NUM_TOKENS, make_checkpoint, with_pictures_of_1024_tokens

pytest_plugins = ("tests.page_fixtures",)

# Experts, three rotary positions of a token, pictures of all sizes and features for several layers; tokens of a picture
# that see each other; pictures whose tokens see each other and are twice as many as go in a step by default.
SERVED = [
    ("qwen3_vl_moe", "inline"),
    pytest.param(("gemma3", "separate"), marks=pytest.mark.slow),
    ("paligemma", "separate"),
]
ONE_PICTURE: list[tuple[str, list[int]]] = [("What?", [0]), ("What?", [1])]
QUESTIONS = {
    "qwen3_vl_moe": [*ONE_PICTURE, ("And these?", [2, 3, 0]), ("Hello", [])],
    "gemma3": [*ONE_PICTURE, ("And these?", [2, 3, 0]), ("Hello", [])],
    "paligemma": [*ONE_PICTURE, ("Where is it?", [2]), ("Why?", [3])],
}


def video_part(content: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(content, "video/mp4")}}


class Served:
    """A family's checkpoint, an endpoint for it, and the whole model beside it."""

    def __init__(self, model_type: str, checkpoint: str, url: str) -> None:
        self.model_type = model_type
        self.url = url
        self._client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
        self.items = MultiModalProcessor(ProcessorConfig(checkpoint)).items
        self._oracle = FamilyOracle(model_type, checkpoint)

    def ask(
        self,
        text: str,
        pictures: list[int],
        videos: Sequence[int] = (),
        further: Sequence[dict[str, Any]] = (),
        **fields: Any,
    ) -> Any:
        """`further`: parts of the message that stand behind the pictures and videos."""
        message = user_message(text, *(encoded(picture(index)) for index in pictures))
        parts = [*(video_part(clip(index)) for index in videos), *further]
        message["content"][len(pictures) : len(pictures)] = parts
        return self._client.chat.completions.create(
            model="small",
            messages=[message],
            temperature=0,
            max_tokens=NUM_TOKENS,
            extra_body={"ignore_eos": True, "return_token_ids": True, **fields},
        )

    def complete(self, prompt: str, media: dict[str, list[str]]) -> Any:
        return self._client.completions.create(
            model="small",
            prompt=prompt,
            temperature=0,
            max_tokens=NUM_TOKENS,
            extra_body={"multi_modal_data": media, "ignore_eos": True, "return_token_ids": True},
        ).choices[0]

    def text_of(self, text: str, kinds: Sequence[str]) -> str:
        return self._oracle.text_of(text, kinds)

    def expected(
        self, text: str, pictures: list[int], videos: Sequence[int] = (), kinds: Sequence[str] | None = None
    ) -> tuple[list[int], list[int]]:
        return self._oracle.expected(text, [picture(index) for index in pictures], videos, kinds)


@pytest.fixture(scope="module", params=SERVED, ids=" ".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ray_port: int) -> Iterator[Served]:
    model_type, placement = request.param
    change = with_pictures_of_1024_tokens if model_type == "paligemma" else lambda folder: None
    checkpoint = make_checkpoint(model_type, tmp_path_factory.mktemp(model_type), change=change)
    config = AppConfig.model_validate(
        {"model": checkpoint, "served_model_name": "small", "encode": {"placement": placement}}
    )
    with deployed_app(config, host="127.0.0.1", port=ray_port) as url:
        yield Served(model_type, checkpoint, url)


def test_answers_are_those_of_generate(served: Served) -> None:
    questions = QUESTIONS[served.model_type]
    with ThreadPoolExecutor(len(questions)) as pool:
        completions = list(pool.map(lambda question: served.ask(*question), questions))
    answers = list(map(tokens_of, completions))
    assert answers == [served.expected(*question) for question in questions]
    assert len({tuple(answer) for _, answer in answers}) == len(questions), "answers must depend on the input"


def test_more_tokens_that_see_each_other_than_a_step_can_hold_are_refused_with_the_numbers(served: Served) -> None:
    if served.model_type != "paligemma":
        return
    with pytest.raises(BadRequestError, match=r"20\d\d tokens of the prompt attend to each other.* is 1408") as caught:
        served.ask("And these?", [0, 1])
    assert caught.value.code == "context_length_exceeded"


def test_videos_are_answered_as_by_generate(served: Served) -> None:
    if served.model_type != "qwen3_vl_moe":
        with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\].video_url: .*video") as caught:
            served.ask("What happens?", [], [0])
        assert caught.value.status_code == 400
        return
    asked = [("What happens?", [], [0]), ("And here?", [1], [1, 2])]
    completions = [served.ask(*question) for question in asked]
    answers = list(map(tokens_of, completions))
    assert answers == [served.expected(*question) for question in asked]


def test_a_request_chooses_how_many_frames_of_a_video_the_model_gets(served: Served) -> None:
    """Of 24 frames in 3 seconds, and beside a picture, which has no such option."""
    if served.model_type != "qwen3_vl_moe":
        return  # takes no videos

    def num_tokens(**fields: Any) -> int:
        return len(served.ask("?", [0], [0], **fields).prompt_token_ids)

    two, four, both, usual = (
        num_tokens(media_io_kwargs={"video": video})
        for video in ({"fps": 0.7}, {"num_frames": 4}, {"num_frames": 4, "fps": 0.7}, {})
    )
    # of 4 frames at least, whatever the rate
    assert two == four == both < usual == num_tokens()
    assert num_tokens(media_io_kwargs={"video": {"num_frames": 8}}) > usual


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "media_io_kwargs.video.num_frames", "equal to 1"),
        ({"media_io_kwargs": {"video": {"num_frames": 9}}}, "media_io_kwargs.video.num_frames", "from 2 to 8"),
        ({"media_io_kwargs": {"video": {"fps": 31}}}, "media_io_kwargs.video.fps", "at most 30"),
        ({"media_io_kwargs": {"video": {"fps": "fast"}}}, "media_io_kwargs.video.fps", "number"),
        ({"media_io_kwargs": 5}, "media_io_kwargs", "dictionary"),
        (
            {"media_io_kwargs": {"video": {"fps": 2}}, "mm_processor_kwargs": {"fps": 2}},
            "body",
            "fps is set in media_io_kwargs.video and in mm_processor_kwargs",
        ),
        ({"mm_processor_kwargs": {"num_frames": 9}}, "mm_processor_kwargs.num_frames", "from 2 to 8"),
    ],
)
def test_wrong_numbers_of_frames_are_refused_by_name(
    served: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    if served.model_type != "qwen3_vl_moe":
        return  # takes no videos
    with pytest.raises(BadRequestError, match=message) as caught:
        served.ask("?", [], [0], **fields)
    assert caught.value.param == param


def test_the_page_asks_about_videos_where_the_model_takes_them(
    served: Served, context: BrowserContext, tmp_path: Path
) -> None:
    file = tmp_path / "clip.mp4"
    file.write_bytes(clip(0))
    page = open_page(context, served.url, "small")
    page.set_input_files("#media-files", file)
    if served.model_type != "qwen3_vl_moe":
        complaint = "it is a video, and the model here takes only pictures and PDFs"
        expect(page.get_by_role("alert")).to_contain_text(complaint)
        expect(page.get_by_role("button", name="Add pictures and PDFs")).to_be_visible()
    else:
        expect(page.locator("#attached video")).to_have_count(1)
        expect(page.get_by_role("button", name="Add pictures, PDFs and videos")).to_be_visible()
        make_endless(page, NUM_TOKENS)
        ask(page, "What happens?")
        expect(page.locator("article.user video")).to_have_count(1)
        expect(page.locator(".measures summary")).to_contain_text(f"{NUM_TOKENS} completion tokens")


def test_items_beside_a_prompt_go_where_its_placeholders_are(served: Served) -> None:
    """Whatever the order in which the client names pictures and videos."""
    if served.model_type != "qwen3_vl_moe":
        return  # takes no videos
    pictures = [data_url(encoded(picture(index))) for index in (0, 1)]
    videos = [video_part(clip(0))["video_url"]["url"]]
    for kinds in (["image", "video", "image"], ["video", "image", "image"]):
        expected = served.expected("What?", [0, 1], [0], kinds)
        prompt = served.text_of("What?", kinds)
        for media in ({"image": pictures, "video": videos}, {"video": videos, "image": pictures}):
            choice = served.complete(prompt, media)
            assert (choice.prompt_token_ids, choice.token_ids) == expected


def test_malformed_tensors_of_a_client_are_refused_by_name(served: Served) -> None:
    image = picture(1)
    info, tensors = served.items.process("image", encoded(image))
    wrong = [torch.zeros(()), torch.zeros(16), torch.zeros(16, 100), torch.zeros(tensors["pixel_values"].shape).bool()]
    files = [{**tensors, "pixel_values": one} for one in wrong]
    # As many as the picture takes, of a model of another width.
    files += [{"embeddings": torch.zeros(info.num_embeds, 100)}]
    for file in files:
        size = {"size": torch.tensor([image.height, image.width])}
        content = base64.b64encode(save({**file, **size})).decode()
        with pytest.raises(BadRequestError) as caught:
            served.ask("What?", [0], further=[{"type": "image_embeds", "image_embeds": content}])
        assert caught.value.param == "messages[0].content[1].image_embeds"
        assert caught.value.code == "invalid_tensors"
    assert f"embeddings of shape [{info.num_embeds}, 100], for this item the model takes [{info.num_embeds}," in str(
        caught.value
    )
