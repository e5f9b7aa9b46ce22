"""Two idle replicas of Preprocess and of Encode: each gets one of two new pictures of a request."""

from collections import Counter

import pytest
from openai import OpenAI
from PIL import Image
from prometheus_client.mmap_dict import MmapedDict

from raylens.deployments.config import AppConfig
from raylens.deployments.metrics.recording import metrics_folder
from tests.pictures import encoded, user_message

NUM_REQUESTS, LEAST_SPLIT = 20, 16
"""On a busy machine, a picture may be encoded before Preprocess takes the other. By chance, half of all pairs split."""


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    two = {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.25}
    small = {"num_cpus": 0.1}
    return AppConfig.model_validate(
        {"model": shapes, "preprocess": two, "encode": two, "generate": small, "ingress": small, "shared": small}
    )


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
