"""Pictures that take a second each to encode: the language model works meanwhile, and nothing is encoded for nobody."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from raylens.deployments.config import AppConfig
from tests.metric_values import exported
from tests.pictures import user_message
from tests.replicas import replica_pids
from tests.slow_encoder import large_picture, make_slow_checkpoint
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SIDE = 1400  # pixels: 10,000 patches, 2,500 tokens


@pytest.fixture(scope="module")
def app_config(tmp_path_factory: pytest.TempPathFactory) -> AppConfig:
    checkpoint = make_slow_checkpoint(tmp_path_factory.mktemp("model"), SIDE)
    settings = {"model": checkpoint, "served_model_name": "small"}
    # A busy machine takes long to replace a killed replica.
    return AppConfig.model_validate(settings | {"ingress": {"away_timeout_s": 60}})


def picture(number: int) -> bytes:
    return large_picture(number, SIDE)


def question(*pictures: bytes) -> dict[str, Any]:
    return {
        "model": "small",
        "messages": [user_message("What?", *pictures)],
        "temperature": 0,
        "max_tokens": 2,
        "extra_body": {"stage_timings": True, "ignore_eos": True},
    }


def ask(client: OpenAI, *pictures: bytes) -> Any:
    return client.chat.completions.create(**question(*pictures))


def test_the_language_model_begins_while_pictures_are_encoded(client: OpenAI) -> None:
    """The prompt's computation includes the wait for each picture behind the first one. Which of two new pictures is
    encoded first is left to chance, so the first one is there already. It stood elsewhere: its tokens are computed."""
    ask(client, picture(3), picture(0))
    seconds = ask(client, *map(picture, range(3))).stage_timings["seconds"]
    # The pictures in another order: they are encoded already, and no prefix of the prompt is cached.
    again = ask(client, *map(picture, reversed(range(3)))).stage_timings["seconds"]
    assert "encode" not in again
    # The wait is that for two pictures, or for one where processing is slower. Half of one is asked for, since other
    # work slows some steps and not others.
    assert seconds["prefill"] > again["prefill"] + seconds["encode"] / 2


def test_embeddings_outlive_the_replica_that_made_them(client: OpenAI, app_url: str) -> None:
    """And pixels that have been encoded are not even shipped."""
    first = ask(client, picture(10))
    (pid,) = replica_pids("Encode")
    os.kill(pid, signal.SIGKILL)
    shipped = exported(app_url, "object_store_transfer_bytes", edge="preprocess_encode")
    second = ask(client, picture(10))
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.stage_timings["embedding_cache_hits"] == 1
    assert {"processor", "transfer_pixels", "encode"}.isdisjoint(second.stage_timings["seconds"])
    assert exported(app_url, "object_store_transfer_bytes", edge="preprocess_encode") == shipped > 0


def test_who_goes_away_leaves_nothing_to_encode(client: OpenAI, app_url: str) -> None:
    """Pictures that wait in the encoder are forgotten with the client that wanted them."""
    num_encoded = exported(app_url, "encoder_items_total", status="ok")

    def one_is_encoded() -> bool:
        return exported(app_url, "encoder_items_total", status="ok") > num_encoded

    num_pictures = 16
    num_left = asyncio.run(
        ask_and_leave(client, [picture(100 + number) for number in range(num_pictures)], one_is_encoded)
    )
    assert num_left > num_pictures // 2
    num_encoded = exported(app_url, "encoder_items_total", status="ok")
    ask(client, picture(1000))  # behind whatever is left
    num_more = exported(app_url, "encoder_items_total", status="ok") - num_encoded
    assert num_more in (1, 2), "the last one, and perhaps what was in work"
    # Others went before they came that far.
    assert exported(app_url, "encoder_items_total", status="aborted") > 0


async def ask_and_leave(client: OpenAI, pictures: list[bytes], may_leave: Callable[[], bool]) -> int:
    """Asks of each picture, each on a connection of its own. Returns how many had no answer before the clients left."""
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as leaving:
        asked = [asyncio.create_task(leaving.chat.completions.create(**question(one))) for one in pictures]
        await asyncio.to_thread(wait_until, may_leave, 120)
        for answer in asked:
            answer.cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
    return sum(isinstance(answer, asyncio.CancelledError) for answer in answers)
