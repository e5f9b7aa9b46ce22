"""`encode.placement: auto`: few pictures are encoded in Generate while Encode rests; many start it."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import OpenAI

from raylens.deployments.config import AppConfig
from tests.replicas import replica_pids
from tests.slow_encoder import answers_about, make_slow_checkpoint
from tests.waiting import wait_until

SIDE = 1000
NUM_AT_ONCE = 64


@pytest.fixture(scope="module")
def app_config(tmp_path_factory: pytest.TempPathFactory) -> AppConfig:
    settings = {
        "model": make_slow_checkpoint(tmp_path_factory.mktemp("model"), SIDE),
        "served_model_name": "small",
        "encode": {"placement": "auto", "min_replicas": 0},
        "scaling": {"downscale_delay_s": 1},
    }
    return AppConfig.model_validate(settings)


@pytest.mark.slow
def test_few_pictures_are_encoded_while_encode_rests_and_many_start_it(client: OpenAI, app_url: str) -> None:
    one_by_one = [answers_about(client, [number], SIDE)[0] for number in range(6)]
    assert len(set(one_by_one)) > 1
    assert replica_pids("Encode") == []
    assert httpx.get(f"{app_url}/health").json()["stages"]["encode"] == "ready"

    with ThreadPoolExecutor(1) as thread:
        heavy = thread.submit(answers_about, client, range(NUM_AT_ONCE), SIDE, at_once=NUM_AT_ONCE, tail=b"heavy")
        wait_until(lambda: len(replica_pids("Encode")) == 1)
        assert not heavy.done()
        assert heavy.result()[: len(one_by_one)] == one_by_one
    assert encoded_items(app_url) >= {"Encode", "Generate"}

    wait_until(lambda: replica_pids("Encode") == [], 40)
    assert answers_about(client, [0], SIDE, tail=b"again") == one_by_one[:1]


def encoded_items(url: str) -> set[str]:
    """The deployments that have encoded items."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("raylens_encoder_items_total{")]
    return {line.partition('deployment="')[2].partition('"')[0] for line in counted}
