"""Metrics agree with what clients count, to the request and to the token, also when replicas are killed meanwhile."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI

from raylens.deployments.config import AppConfig
from tests.metric_values import samples
from tests.pictures import disc, encoded, user_message
from tests.replicas import replica_pids
from tests.waiting import wait_until

COLOURS = ("red", "green", "blue")
NUM_CLIENTS = 4
NUM_LONG = 60
MAX_TOKENS = 30
Counts = Counter[tuple[str, ...]]


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    # A busy machine takes long to replace a killed replica.
    ingress = {"min_replicas": 2, "max_replicas": 2, "away_timeout_s": 60}
    return AppConfig.model_validate({"model": shapes, "ingress": ingress})


@pytest.fixture(scope="module")
def keeps_app_as_it_is() -> bool:
    return False


class CountingClient:
    """Asks, and counts what it gets by the names that the metrics have for it."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self._lock = threading.Lock()
        self.counts: Counts = Counter()

    def ask(self, message: dict[str, Any], *, stream: bool = False, num_items: int = 0, **fields: Any) -> None:
        fields = {"model": "shapes", "messages": [message], "temperature": 0, **fields}
        counts: Counts = Counter()
        try:
            usage, reason = self._stream(**fields) if stream else self._complete(**fields)
        except APIStatusError as error:
            body: Any = error.body
            counts["request_errors", body["code"] or "StageFailedError"] += 1
        else:
            counts["request_success", reason] += 1
            counts["prompt_tokens",] += usage.prompt_tokens
            counts["prompt_tokens_cached",] += usage.prompt_tokens_details.cached_tokens
            counts["generation_tokens",] += usage.completion_tokens
            counts["mm_items",] += num_items
        with self._lock:
            self.counts += counts

    def _complete(self, **fields: Any) -> tuple[Any, str]:
        completion = self._client.chat.completions.create(**fields)
        return completion.usage, completion.choices[0].finish_reason

    def _stream(self, **fields: Any) -> tuple[Any, str]:
        chunks = list(
            self._client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields)
        )
        reasons = [
            chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason
        ]
        return chunks[-1].usage, reasons[-1]


def measured(url: str) -> Counts:
    """The same by the endpoint's metrics."""
    counts: Counts = Counter()
    for name, tags in (
        ("request_errors", ("code",)),
        ("request_success", ("finished_reason",)),
        ("prompt_tokens", ()),
        ("prompt_tokens_cached", ()),
        ("generation_tokens", ()),
        ("mm_items", ()),
    ):
        for sample in samples(url, f"{name}_total"):
            counts[name, *(sample.labels[tag] for tag in tags)] += int(sample.value)
    return counts


def num_gaps(url: str) -> int:
    """Those between tokens, by the endpoint's metrics."""
    return sum(int(sample.value) for sample in samples(url, "inter_token_latency_seconds_count"))


def picture_question(number: int) -> Any:
    """About a picture that no other number gives."""
    size = (96 + number % 64, 96 + number // 64)
    return user_message("What colour is the circle?", encoded(disc(COLOURS[number % 3], size, (36, 36))))


def mixed(client: CountingClient, number: int) -> None:
    """One request of many kinds."""
    match number % 6:
        case 0:
            client.ask(user_message("hello"), stream=True)
        case 1:
            client.ask(user_message("count to ten"), max_tokens=2)
        case 2:
            client.ask(picture_question(number), num_items=1)
        case 3:
            client.ask(picture_question(number % 4), stream=True, num_items=1)
        case 4:
            client.ask(user_message("hello"), top_p=7)
        case _:
            client.ask(user_message("hello"), model="unknown")


def long_answer(client: CountingClient, number: int) -> None:
    client.ask(picture_question(number), num_items=1, max_tokens=MAX_TOKENS, extra_body={"ignore_eos": True})


def run(client: CountingClient, numbers: range, ask: Callable[[CountingClient, int], None]) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        list(pool.map(lambda number: ask(client, number), numbers))


def test_metrics_count_what_clients_count(app_url: str, client: OpenAI) -> None:
    counting, before, gaps_before = CountingClient(client), measured(app_url), num_gaps(app_url)
    run(counting, range(60), mixed)
    assert (
        counting.counts["request_errors", "model_not_found"] == counting.counts["request_errors", "invalid_value"] == 10
    )
    assert +(measured(app_url) - before) == +counting.counts
    num_answers = sum(number for name, number in counting.counts.items() if name[0] == "request_success")
    # Tokens that came together with an answer's first have no gap before them.
    assert 0 < num_gaps(app_url) - gaps_before <= counting.counts["generation_tokens",] - num_answers


@pytest.mark.slow
@pytest.mark.parametrize("deployment", ["Generate", "Encode", "Preprocess"])
def test_an_answer_that_is_made_again_counts_once(app_url: str, client: OpenAI, deployment: str) -> None:
    counting, before = CountingClient(client), measured(app_url)
    (pid,) = replica_pids(deployment)
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    first = 1000 * len(deployment)
    run(counting, range(first, first + NUM_LONG), long_answer)
    wait_until(lambda: replica_pids(deployment) not in ([], [pid]), 60)
    assert counting.counts["request_success", "length"] > NUM_LONG / 2
    counted = measured(app_url) - before
    assert counting.counts - counted == Counter()
    # An answer may have begun, which its client never sees, before it failed for good.
    num_failed = sum(number for name, number in counting.counts.items() if name[0] == "request_errors")
    extra = counted - counting.counts
    assert extra.keys() <= {("generation_tokens",), ("prompt_tokens",), ("prompt_tokens_cached",), ("mm_items",)}
    assert extra["mm_items",] <= num_failed
    assert extra["generation_tokens",] <= num_failed * MAX_TOKENS


def test_what_a_killed_ingress_has_counted_is_not_lost(app_url: str, client: OpenAI) -> None:
    counting, before = CountingClient(client), measured(app_url)
    run(counting, range(300, 330), mixed)
    pids = replica_pids("Ingress")
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(set(replica_pids("Ingress")) - set(pids)) == 1 + pids.index(pid), 60)  # noqa: B023
    wait_until(lambda: measured(app_url) == before + counting.counts, 30)
    # HAProxy forgets the dead ones, and knows new ones.
    wait_until(lambda: all(httpx.get(f"{app_url}/health").is_success for _ in range(20)), 60)
    run(counting, range(330, 360), mixed)
    # HAProxy may still refuse one, which no ingress counts.
    counting.counts["request_errors", "endpoint_unavailable"] = 0
    assert +(measured(app_url) - before) == +counting.counts


def test_dead_replicas_leave_no_series(app_url: str, client: OpenAI) -> None:
    def series() -> set[tuple[str, ...]]:
        return {
            (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "replica"))
            for sample in samples(app_url)
        }

    counting = CountingClient(client)
    run(counting, range(360, 372), mixed)
    before, replicas = series(), {sample.labels.get("replica") for sample in samples(app_url)}
    for deployment in ("Generate", "Encode"):
        (pid,) = replica_pids(deployment)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: replica_pids(deployment) not in ([], [pid]), 60)  # noqa: B023
    wait_until(lambda: client.with_options(timeout=5).models.list().data != [], 30)
    counting.ask(picture_question(9999))
    wait_until(lambda: series() == before, 30)
    now = {sample.labels.get("replica") for sample in samples(app_url)}
    assert len(now) == len(replicas)
    assert len(now - replicas) == 2
