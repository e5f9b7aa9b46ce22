"""A text model with eyes from an installed plug-in, over HTTP: greedy tokens are those of `generate`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from openai import InternalServerError, OpenAI
from PIL import Image

from raylens.deployments.launch.config_file import ConfigError, load_config
from raylens.deployments.launch.local_cluster import deployed_app
from raylens.preprocess.data_url import data_url
from tests.exact_answers import EXACTLY, NUM_TOKENS, ask, tokens_of
from tests.pictures import encoded
from tests.preprocess.parity import picture
from tests.preprocess.vision_plugins import plug_in
from tests.preprocess.vision_plugins.text_model_oracle import TextModelOracle
from tests.replicas import replica_log, replica_pids
from tests.waiting import wait_until

Question = tuple[str, list[Image.Image]]
QUESTIONS: list[Question] = [
    ("What?", [picture(0)]),
    ("What?", [picture(1)]),
    ("And these?", [picture(2), picture(0)]),
    ("Hello", []),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return plug_in.make_text_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def oracle(checkpoint: str) -> TextModelOracle:
    module = ModuleType("plug_in")
    exec(plug_in.MODULE, vars(module))
    plugin = module.get_pipeline(plug_in.NAME, {"vision_device": "cpu", "vision_bits": 32})
    plugin.load()
    marks = (plug_in.START, plug_in.END)
    return TextModelOracle(checkpoint, lambda image: plugin.embed_images([image])[0], marks, plug_in.PLACEHOLDER)


@pytest.fixture(scope="module")
def url(checkpoint: str, ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = {"model": checkpoint, "served_model_name": "small", "vision_plugin.name": plug_in.NAME}
    with plug_in.installed(tmp_path_factory.mktemp("package")):
        config = load_config(None, {**flags, "step_timeout_s": 9.0})
        with deployed_app(config, host="127.0.0.1", port=ray_port) as url:
            yield url


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)


def prompt_of(text: str, pictures: list[Image.Image]) -> str:
    return "user: " + "<image>\n" * len(pictures) + text + "\nassistant:"


def test_answers_are_those_of_generate(client: OpenAI, oracle: TextModelOracle) -> None:
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        completions = list(pool.map(lambda question: ask(client, *question), QUESTIONS))
    found = list(map(tokens_of, completions))
    assert found == [oracle.expected(prompt_of(*question), question[1], NUM_TOKENS) for question in QUESTIONS]
    assert len({tuple(answer) for _, answer in found}) == len(QUESTIONS)
    again = ask(client, *QUESTIONS[2])
    assert again.choices[0].token_ids == found[2][1]
    assert again.stage_timings["embedding_cache_hits"] == 2


def test_pictures_in_the_text_of_a_prompt(client: OpenAI, oracle: TextModelOracle) -> None:
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
    expected = oracle.expected("<image>".join(texts), pictures, NUM_TOKENS)
    assert (completion.choices[0].prompt_token_ids, completion.choices[0].token_ids) == expected


def test_a_placeholder_in_a_prompt_without_pictures_is_text(client: OpenAI, oracle: TextModelOracle) -> None:
    completion: Any = client.completions.create(
        model="small", prompt="What is <image>?", max_tokens=1, extra_body=EXACTLY
    )
    assert completion.choices[0].prompt_token_ids == oracle.tokenizer("What is <image>?")["input_ids"]


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (plug_in.RAISES, "failed on this picture"),
        (plug_in.WRONG_NUMBER, r"returned embeddings of shape \(1, 5, 32\), it should be \(1, 6, 32\)"),
    ],
)
def test_a_plug_in_that_fails_ends_its_request_alone(
    client: OpenAI, oracle: TextModelOracle, size: tuple[int, int], reason: str
) -> None:
    bad = Image.new("RGB", size)
    with ThreadPoolExecutor(3) as pool:
        failing = pool.submit(ask, client, "What?", [bad])
        others = [pool.submit(ask, client, "Now?", [picture(index)]) for index in (5, 6)]
        with pytest.raises(InternalServerError, match=rf"messages\[0\].* plug-in 'blocks-4x4' {reason}"):
            failing.result()
        for index, other in zip((5, 6), others, strict=True):
            _, expected = oracle.expected(prompt_of("Now?", [picture(index)]), [picture(index)], NUM_TOKENS)
            assert other.result().choices[0].token_ids == expected


def test_an_error_of_a_plug_in_is_in_the_log_with_its_request(client: OpenAI) -> None:
    (pid,) = replica_pids("Encode")
    with pytest.raises(InternalServerError) as failed:
        ask(client, "Why?", [Image.new("RGB", plug_in.RAISES)])
    request_id = str(failed.value.request_id)
    wait_until(lambda: request_id in (log := replica_log(pid)) and plug_in.REASON in log)
    assert "in embed_images" in replica_log(pid)


@pytest.mark.slow
def test_a_plug_in_that_hangs_ends_its_request_alone(client: OpenAI, oracle: TextModelOracle) -> None:
    pids = replica_pids("Encode")
    with ThreadPoolExecutor(3) as pool:
        hanging = pool.submit(ask, client, "What?", [Image.new("RGB", plug_in.HANGS)])
        others = [pool.submit(ask, client, "Then?", [picture(index)]) for index in (7, 8)]
        with pytest.raises(InternalServerError, match="plug-in 'blocks-4x4' took more than 3 s for this picture"):
            hanging.result()
        for index, other in zip((7, 8), others, strict=True):
            _, expected = oracle.expected(prompt_of("Then?", [picture(index)]), [picture(index)], NUM_TOKENS)
            assert other.result().choices[0].token_ids == expected
    # The call that hangs goes with its process.
    wait_until(lambda: not set(pids) & set(replica_pids("Encode")), 60)
    _, expected = oracle.expected(prompt_of("Later?", [picture(9)]), [picture(9)], NUM_TOKENS)
    assert ask(client, "Later?", [picture(9)]).choices[0].token_ids == expected


def test_wrong_choices_are_refused_at_once(checkpoint: str, shapes: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--vision-plugin nothing: no such plug-in is installed, only \["):
        load_config(None, {"model": checkpoint, "vision_plugin.name": "nothing"})
    with pytest.raises(ConfigError, match="has a vision half and takes no vision plug-in"):
        load_config(None, {"model": shapes, "vision_plugin.name": "auto"})
    folder = {"vision_plugin.folder": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match="vision_plugin.folder: .* is no folder"):
        load_config(None, {"model": checkpoint, "vision_plugin.name": "auto", **folder})
    with pytest.raises(ConfigError, match="'llama' is not supported"):
        load_config(None, {"model": checkpoint})
