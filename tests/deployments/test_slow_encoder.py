"""While pictures are encoded that take a second each: the language model works meanwhile, nobody encodes for nothing."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import APITimeoutError, OpenAI
from PIL import Image

from deployments.config import AppConfig
from tests.metric_values import exported
from tests.pictures import encoded, user_message
from tests.small_models import make_checkpoint

SIDE = 980  # pixels: 4,900 patches, 1,225 tokens


@pytest.fixture(scope="module")
def app_config(tmp_path_factory: pytest.TempPathFactory) -> AppConfig:
    checkpoint = make_checkpoint("qwen2_vl", tmp_path_factory.mktemp("model"))
    file = Path(checkpoint) / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"] = {"shortest_edge": 3136, "longest_edge": SIDE**2}
    file.write_text(json.dumps(settings))
    return AppConfig.model_validate({"model": checkpoint, "served_model_name": "small"})


def picture(number: int) -> bytes:
    rows = np.random.default_rng(number).integers(0, 256, (SIDE // 20, SIDE // 20, 3), dtype=np.uint8)
    return encoded(Image.fromarray(rows).resize((SIDE, SIDE)))


def ask(client: OpenAI, *pictures: bytes) -> Any:
    return client.chat.completions.create(
        model="small",
        messages=[user_message("What?", *pictures)],
        temperature=0,
        max_tokens=2,
        extra_body={"stage_timings": True, "ignore_eos": True},
    )


def test_the_language_model_begins_while_pictures_are_encoded(client: OpenAI) -> None:
    """The prompt's computation takes as long as the pictures behind the first one take, for it waits for each."""
    seconds = ask(client, *map(picture, range(4))).stage_timings["seconds"]
    assert seconds["prefill"] > 2 * seconds["encode"]
    again = ask(client, *map(picture, range(4))).stage_timings["seconds"]
    assert "encode" not in again
    assert again["prefill"] < seconds["encode"]


def test_who_goes_away_leaves_nothing_to_encode(client: OpenAI, app_url: str) -> None:
    """Pictures that wait in the encoder are forgotten with the client that wanted them."""
    encoded_before = exported(app_url, "encoder_items_total", status="ok")
    num_pictures = 10
    impatient = client.with_options(timeout=2)
    with ThreadPoolExecutor(num_pictures) as pool:
        tries = [pool.submit(ask, impatient, picture(100 + number)) for number in range(num_pictures)]
        num_timeouts = sum(isinstance(one.exception(), APITimeoutError) for one in tries)
    ask(client, picture(0))  # behind whatever is left
    num_encoded = exported(app_url, "encoder_items_total", status="ok") - encoded_before
    assert num_timeouts > num_pictures // 2
    assert num_encoded <= num_pictures - num_timeouts + 2, "those answered, and what was in work"
    assert exported(app_url, "encoder_items_total", status="aborted") >= num_timeouts - 2
