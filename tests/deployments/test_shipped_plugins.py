"""A text model with the eyes that come with Raylens, over HTTP: greedy tokens are those of `generate`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from PIL import Image

from raylens.deployments.launch.config_file import load_config
from raylens.deployments.launch.local_cluster import deployed_app
from tests.exact_answers import NUM_TOKENS, ask, tokens_of
from tests.preprocess.parity import picture
from tests.preprocess.vision_plugins import plug_in
from tests.preprocess.vision_plugins.text_model_oracle import TextModelOracle
from tests.preprocess.vision_plugins.whole_models import WholeModel, save_llava_parts, save_minigpt4_parts, squared


@dataclass(frozen=True)
class Shipped:
    """A plug-in that comes with Raylens, the model that its parts are from, and what it does to a picture first."""

    whole: str
    save_parts: Callable[[WholeModel, Path], dict[str, Any]]
    marks: tuple[str, str]
    placeholder: int
    prepared: Callable[[Image.Image], Image.Image]


SHIPPED = {
    "llava-v1.5": Shipped("llava", save_llava_parts, ("", ""), 0, squared),
    "minigpt4": Shipped("blip-2", save_minigpt4_parts, ("<Img>", "</Img>"), 1, lambda image: image),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava-v1.5", "minigpt4"])
def test_answers_are_those_of_generate(name: str, ray_port: int, tmp_path: Path) -> None:
    shipped = SHIPPED[name]
    for folder in ("text", "whole", "parts"):
        (tmp_path / folder).mkdir()
    checkpoint = plug_in.make_text_model(tmp_path / "text")
    whole = WholeModel(shipped.whole, tmp_path / "whole")
    options = shipped.save_parts(whole, tmp_path / "parts")

    def embed(image: Image.Image) -> torch.Tensor:
        return whole.features(shipped.prepared(image))

    oracle = TextModelOracle(checkpoint, embed, shipped.marks, shipped.placeholder)
    questions = [("What?", [picture(0)]), ("What?", [picture(3)]), ("And?", [picture(2), picture(4)]), ("Hello", [])]
    flags = {"model": checkpoint, "served_model_name": "small", "vision_plugin.name": name}
    config = load_config(None, {**flags, "vision_plugin.options": options})
    with deployed_app(config, host="127.0.0.1", port=ray_port) as url, ThreadPoolExecutor(len(questions)) as pool:
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
        completions = list(pool.map(lambda question: ask(client, *question), questions))
    found = list(map(tokens_of, completions))
    texts = ["user: " + "<image>\n" * len(pictures) + text + "\nassistant:" for text, pictures in questions]
    asked = zip(texts, questions, strict=True)
    assert found == [oracle.expected(text, pictures, NUM_TOKENS) for text, (_, pictures) in asked]
    assert len({tuple(answer) for _, answer in found}) == len(questions)
