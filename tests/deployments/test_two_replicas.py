"""Two replicas of Preprocess, Encode and Generate: a request goes to the right one of them."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI
from PIL import Image
from prometheus_client.mmap_dict import MmapedDict

from raylens.deployments.config import AppConfig
from raylens.deployments.metrics.recording import metrics_folder
from tests.asking_clients import AskingClients
from tests.pictures import disc, encoded, user_message
from tests.replicas import replica_pids, stopped
from tests.waiting import wait_until

NUM_REQUESTS, LEAST_SPLIT = 20, 16
"""On a busy machine, a picture may be encoded before Preprocess takes the other. By chance, half of all pairs split."""
NUM_CONVERSATIONS, NUM_TURNS = 8, 4
NUM_AT_A_TIME = 2
"""The router takes a replica with four calls for busy, and counts a call for a moment after its end."""
NUM_CLIENTS = 12
HELD_UP_SECONDS = 6.0
"""Ray takes a replica for dead after more."""


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    two, small = {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.5}, {"num_cpus": 0.1}
    stages = {"preprocess": two, "encode": two, "generate": two}
    return AppConfig.model_validate({"model": shapes, **stages, "ingress": small, "shared": small})


def num_items(deployment: str, counter: str) -> Counter[str]:
    """How many items each replica has counted, by the name of its file."""
    counts: Counter[str] = Counter()
    for path in metrics_folder().glob(f"counter_{deployment}-*.db"):
        values = MmapedDict.read_all_values_from_file(str(path))
        counts[path.name] = round(sum(value for key, value, _, _ in values if counter in key))
    return counts


def test_each_replica_gets_one_picture_of_a_pair(client: OpenAI) -> None:
    counters = {"Preprocess": "preprocess_items_total", "Encode": "encoder_items_total"}
    # Large: else the first one may be encoded before the second is sent to Encode.
    picture = encoded(Image.effect_noise((1600, 1600), 50).convert("RGB"), "JPEG")
    shares = []
    for number in range(NUM_REQUESTS):
        before = [num_items(*counter) for counter in counters.items()]
        pair = [picture + bytes([number, of_pair]) for of_pair in range(2)]  # bytes behind its end: another file
        message = user_message("Which colours?", *pair)
        client.chat.completions.create(model="shapes", messages=[message], max_tokens=1)
        after = [num_items(*counter) for counter in counters.items()]
        shares.append([sorted((now - then).values()) for then, now in zip(before, after, strict=True)])
    for of_stage in zip(*shares, strict=True):
        assert of_stage.count([1, 1]) >= LEAST_SPLIT, of_stage


class Conversation:
    """A conversation about a picture. `cached_shares`: how much of each turn's prompt was in a KV cache."""

    def __init__(self, client: OpenAI, number: int) -> None:
        self._client = client
        picture = encoded(disc("red", (96, 96 + number), (36, 36)))
        self._messages = [user_message(f"This is conversation {number}. What colour is the circle?", picture)]
        self.cached_shares: list[float] = []

    def take_a_turn(self) -> None:
        answer = self._client.chat.completions.create(
            model="shapes", messages=self._messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        usage: Any = answer.usage
        self.cached_shares.append(usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens)
        text = answer.choices[0].message.content
        self._messages = [*self._messages, {"role": "assistant", "content": text}, user_message("And its shape?")]


def test_each_turn_finds_the_turns_before_it(client: OpenAI) -> None:
    """A conversation comes back to the replica that has its beginning in its KV cache. Others take turns meanwhile."""
    conversations = [Conversation(client, number) for number in range(NUM_CONVERSATIONS)]
    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        for _ in range(NUM_TURNS):
            list(pool.map(Conversation.take_a_turn, conversations))
    firsts = [one.cached_shares[0] for one in conversations]
    later = [share for one in conversations for share in one.cached_shares[1:]]
    assert max(firsts) < 0.3
    assert min(later) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("deployment", ["Preprocess", "Encode", "Generate"])
def test_requests_go_past_a_replica_that_stands_still(client: OpenAI, deployment: str) -> None:
    wait_until(lambda: len(replica_pids(deployment)) == 2)
    victim = replica_pids(deployment)[0]
    with AskingClients(client, NUM_CLIENTS) as load:
        load.wait_for(NUM_CLIENTS, timeout=60)
        with stopped(victim):
            time.sleep(1)  # whatever had left it before has come
            before = load.num_right
            time.sleep(HELD_UP_SECONDS - 1)
            meanwhile = load.num_right - before
    assert (load.wrong, load.errors) == ([], [])
    assert meanwhile > NUM_CLIENTS, "the other replica answers those that come"
    assert victim in replica_pids(deployment), "it was slow, not dead"
