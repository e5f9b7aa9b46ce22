"""The language model divided among two processes: the same answers, and one fate for all ranks of a replica."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from openai import APIError, OpenAI

from raylens.deployments.config import AppConfig
from raylens.modeling.pooling import PoolingSettings
from raylens.preprocess.schema import PooledPrompt
from tests.deployments.test_pipeline_parity import NUM_TOKENS, QUESTIONS, ask
from tests.generate_oracle import generate_oracle
from tests.pictures import user_message
from tests.pooling.in_process import InProcess, text
from tests.replicas import replica_pids, worker_pids

STEP_TIMEOUT_S = 6.0


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    return AppConfig.model_validate(
        {
            "model": shapes,
            "preprocess": {"max_replicas": 1},
            "encode": {"num_cpus": 0.5},
            "generate": {
                "tensor_parallel_size": 2,
                "num_cpus": 0.5,
                "engine": {"kv_cache_bytes": 2**24},
            },
            "step_timeout_s": STEP_TIMEOUT_S,
            "pooling": {"score_tokens": ["a", "one"]},
        }
    )


def rank_pids() -> list[int]:
    """Ranks other than 0 of all replicas."""
    return worker_pids("GenerateRank")


def wait_until(holds: Callable[[], Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_two_ranks_answer_like_generate(client: OpenAI, app_url: str, shapes: str) -> None:
    assert [len(rank_pids()), len(replica_pids("Generate"))] == [1, 1]
    oracle = generate_oracle(shapes, NUM_TOKENS)
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        completions = list(pool.map(lambda question: ask(client, *question), QUESTIONS))
    for completion, (_, colours) in zip(completions, QUESTIONS, strict=True):
        assert completion.choices[0].token_ids == oracle(completion.prompt_token_ids, colours)


def test_two_ranks_pool_like_one(app_url: str, shapes: str) -> None:
    """The logits of the two tokens come from different ranks' parts of the head."""
    documents = ["a red circle", "a blue square", "nothing"]
    library = InProcess(shapes, PoolingSettings(score_tokens=("a", "one")))
    rows = library.pool(*((PooledPrompt([text(one)], [text("What?")]), []) for one in documents))
    expected = [1 / (1 + np.exp(-float(row[0, 0]))) for row in rows]
    body = {"queries": "What?", "documents": documents}
    told = httpx.post(f"{app_url}/v1/score", json=body, timeout=60).json()["data"]
    np.testing.assert_allclose([one["score"] for one in told], expected, atol=1e-5)


def endless_stream(client: OpenAI) -> Iterator[Any]:
    """Its first pieces are read already."""
    pieces = iter(
        client.chat.completions.create(
            model="shapes",
            messages=[user_message("Hello")],
            stream=True,
            max_tokens=2000,
            extra_body={"ignore_eos": True},
        )
    )
    for _ in range(3):
        next(pieces)
    return pieces


def assert_recovers(client: OpenAI, app_url: str, lost: list[int], timeout_s: float) -> None:
    """There are other ranks than `lost`, in a new replica, and they answer."""
    wait_until(lambda: rank_pids() and replica_pids("Generate") and not set(all_pids()) & set(lost), timeout_s)
    wait_until(lambda: httpx.get(f"{app_url}/health").status_code == 200, timeout_s)
    assert ask(client, *QUESTIONS[0]).usage.completion_tokens == NUM_TOKENS


def all_pids() -> list[int]:
    return rank_pids() + replica_pids("Generate")


def test_a_rank_that_dies_ends_streams_and_the_service_comes_back(client: OpenAI, app_url: str) -> None:
    lost = all_pids()
    stream = endless_stream(client)
    os.kill(rank_pids()[0], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(APIError, match="generate stage is not available"):
        list(stream)
    assert time.monotonic() - killed < 5
    assert_recovers(client, app_url, lost, 45)


@pytest.mark.slow
def test_a_rank_that_dies_while_nobody_asks_is_replaced(client: OpenAI, app_url: str) -> None:
    lost = all_pids()
    os.kill(rank_pids()[0], signal.SIGKILL)
    assert_recovers(client, app_url, lost, 45)


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_streams_and_is_replaced(client: OpenAI, app_url: str) -> None:
    lost = all_pids()
    stream = endless_stream(client)
    os.kill(rank_pids()[0], signal.SIGSTOP)
    with pytest.raises(APIError, match="generate stage is not available"):
        list(stream)
    assert_recovers(client, app_url, lost, 60)


def test_no_rank_outlives_its_replica(client: OpenAI, app_url: str) -> None:
    lost = all_pids()
    os.kill(replica_pids("Generate")[0], signal.SIGKILL)
    assert_recovers(client, app_url, lost, 45)
