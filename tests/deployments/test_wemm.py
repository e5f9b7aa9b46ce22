"""WeMM over HTTP, from a folder as published: greedy tokens are those of the reference."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoTokenizer

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import deployed_app
from raylens.modeling.model_configs import register_model_configs
from tests.metric_values import exported
from tests.pictures import encoded, user_message
from tests.preprocess.parity import picture
from tests.small_models import make_checkpoint
from tests.wemm_reference import ReferenceWemm, reference_num_embeds, reference_pixels

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
Question = tuple[str, list[int]]
QUESTIONS: list[Question] = [
    ("What is it?", [0]),
    ("Hello", []),
    ("What is it?", [1]),
    ("And these?", [2, 3, 0]),
    ("Tell me a story.", []),
    ("Which of them?", [4, 1]),
]
"""Pictures that are square, wide, high, large and very narrow, alone and together, and texts without any."""

GENERATE: dict[str, dict[str, Any]] = {
    # Two ranks, and a cache of 160 positions, in which requests push each other out: it holds two answers at a time.
    "chunks of 7": {
        "tensor_parallel_size": 2,
        "num_cpus": 0.5,
        "engine": {"max_num_batched_tokens": 7, "max_num_seqs": 6, "kv_cache_bytes": 160 * 256 // 2},
    },
    "chunks of 512": {"engine": {"max_num_batched_tokens": 512}},
}


class Reference:
    """The whole model of a checkpoint. It puts prompts together as the description says, not as the server does."""

    def __init__(self, checkpoint: str) -> None:
        register_model_configs()
        self.model = ReferenceWemm.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def prompt(self, question: Question) -> tuple[list[list[int]], list[torch.Tensor]]:
        """The token ids of the texts around the pictures, and the pictures' pixels."""
        text, pictures = question
        whole = "<|im_start|>user\n" + "<image>\n" * len(pictures) + text + "<|im_end|><|im_start|>assistant\n"
        texts = [
            self._tokenizer(part, add_special_tokens=index == 0)["input_ids"]
            for index, part in enumerate(whole.split("<image>"))
        ]
        size = self.model.config.image_processor["size"]
        return texts, [reference_pixels(picture(index), size) for index in pictures]

    def answer(self, question: Question) -> list[int]:
        texts, pictures = self.prompt(question)
        answer: list[int] = self.model.answer(texts, pictures, NUM_TOKENS)
        return answer

    def num_prompt_tokens(self, question: Question) -> int:
        texts, pictures = self.prompt(question)
        return sum(map(len, texts)) + sum(reference_num_embeds(*pixels.shape[1:]) for pixels in pictures)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its tokenizer names code of its own that is not there, and it has no chat template."""
    return make_checkpoint(
        "wemm", tmp_path_factory.mktemp("wemm"), change=lambda folder: (folder / "chat_template.jinja").unlink()
    )


@pytest.fixture(scope="module")
def reference(checkpoint: str) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module", params=["chunks of 7", pytest.param("chunks of 512", marks=pytest.mark.slow)])
def setting(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def url(checkpoint: str, ray_port: int, setting: str) -> Iterator[str]:
    settings = {"model": checkpoint, "served_model_name": "small", "generate": GENERATE[setting]}
    with deployed_app(AppConfig.model_validate(settings), host="127.0.0.1", port=ray_port) as url:
        yield url


def ask(url: str, question: Question) -> Any:
    text, pictures = question
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
    return client.chat.completions.create(
        model="small",
        messages=[user_message(text, *(encoded(picture(index)) for index in pictures))],
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True, "stage_timings": True},
    )


def test_answers_are_those_of_the_reference(url: str, setting: str, reference: Reference) -> None:
    """Three times all of them at once, then one after another with what the cache holds of them.

    The first pictures come late enough that texts may have ended; later ones are cached, so requests meet.
    """
    expected = [reference.answer(question) for question in QUESTIONS]
    assert len({tuple(answer) for answer in expected}) == len(QUESTIONS), "answers must depend on the input"
    preemptions = exported(url, "num_preemptions")  # also those of the application before this one
    with ThreadPoolExecutor(3 * len(QUESTIONS)) as pool:
        completions = list(pool.map(lambda question: ask(url, question), 3 * QUESTIONS))
    assert [one.choices[0].token_ids for one in completions] == 3 * expected
    assert [one.usage.prompt_tokens for one in completions] == 3 * list(map(reference.num_prompt_tokens, QUESTIONS))
    assert (exported(url, "num_preemptions") > preemptions) == (setting == "chunks of 7")
    again = [ask(url, question) for question in (*QUESTIONS[-2:], *QUESTIONS[-2:])]
    assert [one.choices[0].token_ids for one in again] == [*expected[-2:], *expected[-2:]]
    assert again[-1].stage_timings["embedding_cache_hits"] == 2
    assert again[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_the_lora_acts_on_pictures_alone(reference: Reference) -> None:
    """So that the test above can fail: without the LoRA, answers about pictures are others, those of texts the same."""
    reference.model.has_plora = False
    without = [reference.answer(question) for question in QUESTIONS]
    reference.model.has_plora = True
    for question, answer in zip(QUESTIONS, without, strict=True):
        assert (answer == reference.answer(question)) == (not question[1])


def test_further_turns_begin_on_a_new_line(url: str, reference: Reference) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        user_message("What?", encoded(picture(1))),
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": "Sure?"},
    ]
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
    completion: Any = client.chat.completions.create(
        model="small",
        messages=messages,
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    whole = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<image>\nWhat?<|im_end|>"
        "<|im_start|>assistant\nA dog.<|im_end|>\n<|im_start|>user\nSure?<|im_end|><|im_start|>assistant\n"
    )
    texts = [
        reference._tokenizer(part, add_special_tokens=index == 0)["input_ids"]
        for index, part in enumerate(whole.split("<image>"))
    ]
    _, pixels = reference.prompt(("", [1]))
    assert completion.choices[0].token_ids == reference.model.answer(texts, pixels, NUM_TOKENS)


def test_a_placeholder_without_a_picture_is_refused(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
    with pytest.raises(BadRequestError):
        client.completions.create(model="small", prompt="What is <image>?", max_tokens=2)
