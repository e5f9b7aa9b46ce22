"""A text model with eyes from an installed plug-in, over HTTP: greedy tokens are those of `generate`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from openai import InternalServerError, OpenAI
from PIL import Image
from transformers import AutoTokenizer, LlamaForCausalLM

from deployments.config_file import ConfigError, load_config
from deployments.local_cluster import deployed_app
from preprocess.data_url import data_url
from tests.pictures import encoded, user_message
from tests.pipelines import plug_in
from tests.preprocess.parity import picture
from tests.replicas import replica_pids
from tests.waiting import wait_until

NUM_TOKENS = 16
Question = tuple[str, list[Image.Image]]
QUESTIONS: list[Question] = [
    ("What?", [picture(0)]),
    ("What?", [picture(1)]),
    ("And these?", [picture(2), picture(0)]),
    ("Hello", []),
]


class Oracle:
    def __init__(self, checkpoint: str) -> None:
        self.model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        module = ModuleType("plug_in")
        exec(plug_in.MODULE, vars(module))
        self.pipeline = module.get_pipeline(plug_in.NAME, {"vision_device": "cpu", "vision_bits": 32})
        self.pipeline.load()

    def expected(self, text: str, pictures: list[Image.Image]) -> tuple[list[int], list[int]]:
        """The ids of the prompt and of the answer. `text` has <image> in place of each picture, without markers."""
        ids: list[int] = []
        embeds: list[torch.Tensor] = []
        parts = text.split("<image>")
        for index, part in enumerate(parts):
            # The markers belong to the text around a picture, and merge with it.
            whole = (plug_in.END if index else "") + part + (plug_in.START if index < len(parts) - 1 else "")
            own = self.tokenizer(whole, add_special_tokens=index == 0)["input_ids"]
            ids += own
            embeds.append(self.model.get_input_embeddings()(torch.tensor(own, dtype=torch.long)))
            if index < len(pictures):
                ids += [plug_in.PLACEHOLDER] * plug_in.NUM_EMBEDS
                embeds.append(self.pipeline.embed_images([pictures[index]])[0])
        with torch.inference_mode():
            answer = self.model.generate(
                inputs_embeds=torch.cat(embeds)[None],
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
        return ids, answer[0].tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return plug_in.make_text_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def oracle(checkpoint: str) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def url(checkpoint: str, ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = {"model": checkpoint, "served_model_name": "small", "multimodal_pipeline.name": plug_in.NAME}
    with plug_in.installed(tmp_path_factory.mktemp("package")):
        config = load_config(None, {**flags, "encode.step_timeout_s": 9.0})
        with deployed_app(config, host="127.0.0.1", port=ray_port) as url:
            yield url


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)


EXACTLY = {"ignore_eos": True, "return_token_ids": True, "stage_timings": True}


def ask(client: OpenAI, text: str, pictures: list[Image.Image]) -> Any:
    return client.chat.completions.create(
        model="small",
        messages=[user_message(text, *map(encoded, pictures))],
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body=EXACTLY,
    )


def prompt_of(text: str, pictures: list[Image.Image]) -> str:
    return "user: " + "<image>\n" * len(pictures) + text + "\nassistant:"


def test_answers_are_those_of_generate(client: OpenAI, oracle: Oracle) -> None:
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        completions = list(pool.map(lambda question: ask(client, *question), QUESTIONS))
    found = [(one.prompt_token_ids, one.choices[0].token_ids) for one in completions]
    assert found == [oracle.expected(prompt_of(*question), question[1]) for question in QUESTIONS]
    assert len({tuple(answer) for _, answer in found}) == len(QUESTIONS)
    again = ask(client, *QUESTIONS[2])
    assert again.choices[0].token_ids == found[2][1]
    assert again.stage_timings["embedding_cache_hits"] == 2


def test_pictures_in_the_text_of_a_prompt(client: OpenAI, oracle: Oracle) -> None:
    """In text-generation-webui's form."""
    pictures = [picture(3), picture(4)]
    texts = ["Look: ", " and\n", "?"]
    tags = [f'<img src="{data_url(encoded(one), "image/jpeg")}">' for one in pictures]
    completion: Any = client.completions.create(
        model="small",
        prompt=texts[0] + tags[0] + texts[1] + tags[1] + texts[2],
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body=EXACTLY,
    )
    expected = oracle.expected("<image>".join(texts), pictures)
    assert (completion.choices[0].prompt_token_ids, completion.choices[0].token_ids) == expected


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (plug_in.RAISES, "failed on this picture"),
        (plug_in.WRONG_NUMBER, r"returned embeddings of shape \(1, 5, 32\), it should be \(1, 6, 32\)"),
    ],
)
def test_a_plug_in_that_fails_ends_its_request_alone(
    client: OpenAI, oracle: Oracle, size: tuple[int, int], reason: str
) -> None:
    bad = Image.new("RGB", size)
    with ThreadPoolExecutor(3) as pool:
        failing = pool.submit(ask, client, "What?", [bad])
        others = [pool.submit(ask, client, "Now?", [picture(index)]) for index in (5, 6)]
        with pytest.raises(InternalServerError, match=rf"messages\[0\].* pipeline 'blocks-4x4' {reason}"):
            failing.result()
        for index, other in zip((5, 6), others, strict=True):
            _, expected = oracle.expected(prompt_of("Now?", [picture(index)]), [picture(index)])
            assert other.result().choices[0].token_ids == expected


def test_a_plug_in_that_hangs_ends_its_request_alone(client: OpenAI, oracle: Oracle) -> None:
    pids = replica_pids("Encode")
    with ThreadPoolExecutor(3) as pool:
        hanging = pool.submit(ask, client, "What?", [Image.new("RGB", plug_in.HANGS)])
        others = [pool.submit(ask, client, "Then?", [picture(index)]) for index in (7, 8)]
        with pytest.raises(InternalServerError, match="pipeline 'blocks-4x4' took more than 3 s for this picture"):
            hanging.result()
        for index, other in zip((7, 8), others, strict=True):
            _, expected = oracle.expected(prompt_of("Then?", [picture(index)]), [picture(index)])
            assert other.result().choices[0].token_ids == expected
    # The call that hangs goes with its process.
    wait_until(lambda: not set(pids) & set(replica_pids("Encode")), 60)
    _, expected = oracle.expected(prompt_of("Later?", [picture(9)]), [picture(9)])
    assert ask(client, "Later?", [picture(9)]).choices[0].token_ids == expected


def test_wrong_choices_are_refused_at_once(checkpoint: str, shapes: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--multimodal-pipeline nothing: no such plug-in is installed, only \["):
        load_config(None, {"model": checkpoint, "multimodal_pipeline.name": "nothing"})
    with pytest.raises(ConfigError, match="has a vision half and takes no multimodal pipeline"):
        load_config(None, {"model": shapes, "multimodal_pipeline.name": "auto"})
    folder = {"multimodal_pipeline.folder": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match="multimodal_pipeline.folder: .* is no folder"):
        load_config(None, {"model": checkpoint, "multimodal_pipeline.name": "auto", **folder})
    with pytest.raises(ConfigError, match="'llama' is not supported"):
        load_config(None, {"model": checkpoint})
