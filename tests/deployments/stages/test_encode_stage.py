"""Two replicas of Encode: they share a request's pictures, and what one takes with it is encoded by the other."""

import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI

from raylens.deployments.config import AppConfig
from raylens.deployments.stages.encode_stage import Encode, warn_of_largest_item
from raylens.encoder.activation_memory import peak_activation_bytes
from raylens.encoder.config import EncoderConfig
from raylens.encoder.engine import EncoderEngine
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import InvalidRequestError
from tests.metric_values import exported
from tests.model_coverage.small_checkpoints import save_small_checkpoint
from tests.pictures import user_message
from tests.replicas import replica_pids
from tests.slow_encoder import large_picture, make_slow_checkpoint
from tests.sounds import RATE

SIDE = 700  # pixels: 2,500 patches, 625 tokens
TOO_LARGE = 1000  # 4,900 patches
PATCH_BYTES = 8376  # that encoding takes in this model
NUM_PICTURES = 64
SIDE_OF_MANY = 500  # pixels: most of the pictures are not encoded yet when the first ones are answered


@pytest.fixture(scope="module")
def app_config(tmp_path_factory: pytest.TempPathFactory) -> AppConfig:
    """It keeps no embeddings, so that every request encodes anew, and has memory for 3,500 patches."""
    checkpoint = make_slow_checkpoint(tmp_path_factory.mktemp("model"), TOO_LARGE)
    settings = {
        "model": checkpoint,
        "served_model_name": "small",
        "shared": {"embedding_cache_bytes": 0},
        "encode": {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.5, "activation_bytes": 3500 * PATCH_BYTES},
    }
    return AppConfig.model_validate(settings)


def ask(client: OpenAI, *pictures: bytes) -> list[int]:
    completion: Any = client.chat.completions.create(
        model="small",
        messages=[user_message("What?", *pictures)],
        temperature=0,
        max_tokens=8,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    token_ids: list[int] = completion.choices[0].token_ids
    return token_ids


def jiffies_run(pid: int) -> int:
    """Fields 14 and 15 of /proc/PID/stat, counted behind the name in brackets."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_one_requests_pictures_are_spread_over_the_replicas(client: OpenAI) -> None:
    pids = replica_pids("Encode")
    before = [jiffies_run(pid) for pid in pids]
    ask(client, *(large_picture(1000 + number, SIDE) for number in range(12)))
    ran = [jiffies_run(pid) - jiffies for pid, jiffies in zip(pids, before, strict=True)]
    assert min(ran) > max(ran) / 12, "each has encoded one at least"


def test_a_picture_that_there_is_no_memory_for_is_the_clients_to_change(client: OpenAI) -> None:
    pictures = [large_picture(2000, SIDE), large_picture(2001, TOO_LARGE)]
    with pytest.raises(BadRequestError, match=r"has 4900 patches that must .* the 3[45]\d\d ") as caught:
        ask(client, *pictures)
    assert caught.value.code == "item_too_large"
    assert caught.value.param == "messages[0].content[1].image_url"
    assert len(ask(client, pictures[0])) == 8, "the other one was fine"


@pytest.mark.slow
def test_a_replica_killed_in_the_middle_of_64_encodes(client: OpenAI, app_url: str) -> None:
    pictures = [large_picture(number, SIDE_OF_MANY) for number in range(NUM_PICTURES)]
    with ThreadPoolExecutor(NUM_PICTURES) as pool:
        expected = list(pool.map(lambda picture: ask(client, picture), pictures))
        assert len({tuple(answer) for answer in expected}) > NUM_PICTURES // 2, "answers must depend on the picture"
        encoded = exported(app_url, "encoder_items_total", status="ok")
        answers = [pool.submit(ask, client, picture) for picture in pictures]
        while sum(answer.done() for answer in answers) < NUM_PICTURES // 8:
            time.sleep(0.01)
        os.kill(replica_pids("Encode")[0], signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
    num_recomputed = exported(app_url, "items_recomputed", stage="encode")
    assert num_recomputed > 0, "or none was in its hands"
    # What the dead replica had encoded and not reported yet is not counted.
    assert exported(app_url, "encoder_items_total", status="ok") - encoded <= NUM_PICTURES


@pytest.mark.parametrize("has_room", [True, False])
def test_the_start_says_when_the_models_largest_picture_will_be_refused(
    shapes: str, has_room: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, items = EncoderEngine(EncoderConfig(shapes)), MultiModalProcessor(ProcessorConfig(shapes)).items
    engine.bound_activations("image", items.blank_item("image", (96, 96))[1], 10**9 if has_room else 10**4)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        warn_of_largest_item(engine, items, "image")
    assert bool(caplog.records) != has_room
    if not has_room:
        assert (
            f"encode {engine.max_segment_patches['image']} patches together; the model's largest picture needs 36"
            in caplog.text
        )


def test_memory_for_sounds_is_measured_by_sounds(tmp_path: Path) -> None:
    """A frame of this model's tower for sounds takes thirteen times the memory of a picture's patch."""
    save_small_checkpoint("nemotron_h_omni", tmp_path)
    items, max_bytes = MultiModalProcessor(ProcessorConfig(str(tmp_path))).items, 64 * 2**20
    config = AppConfig(model=str(tmp_path), encode={"activation_bytes": max_bytes})
    engine = Encode._load(object.__new__(Encode), config)

    def peak(seconds: int) -> int:
        sound = items.blank_item("audio", (seconds * RATE,))[1]
        engine.add_request(str(seconds), "audio", sound)
        return peak_activation_bytes(engine.step, torch.device("cpu"))

    assert 0.5 * max_bytes < peak(16) <= max_bytes
    with pytest.raises(InvalidRequestError, match="the audio has 2000 patches that must .* more than"):
        peak(20)
