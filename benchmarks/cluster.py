"""The cost of several replicas: cache hit ratios, and the time of a hit.

    python -m benchmarks.cluster [--output FILE]

Two parts, both on the real application with the bundled model, behind HAProxy:

- `hits`: conversations with one picture each, six concurrently, five turns each, on 1, 2 and 4 replicas of the ingress,
  of the shards and of Generate. `items` is the share of pictures found in the cache of embeddings, `prefixes` the share
  of prompt tokens found in a KV cache. The checks compare both with one replica of each.
- `hit_ms`: the TTFT of a cached picture, through 1 and through 2 ingresses, in turns. Figures are medians in
  milliseconds.

The last line is one JSON document."""

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from benchmarks.document import at_least, at_most, make_parser, publish, this_machine
from benchmarks.streaming_client import ask
from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import deployed_app, local_ray
from tests.pictures import disc, encoded, user_message
from tests.replicas import replica_pids

MODEL = "shapes"
NUMBERS = (1, 2, 4)
CONVERSATIONS, TURNS, SIDE_BY_SIDE = 24, 5, 6
HITS, ROUNDS, REST_SECONDS = 60, 3, 0.03
MOST_MS = 1.5
"""Allowed extra time of a hit through two ingresses."""


@contextmanager
def deployed(port: int, *, ingresses: int, shards: int, generates: int = 1) -> Iterator[str]:
    """Yields the URL of an application with these numbers of replicas."""
    settings: dict[str, Any] = {
        stage: {"min_replicas": number, "max_replicas": number, "num_cpus": 0.1}
        for stage, number in {"ingress": ingresses, "generate": generates}.items()
    }
    settings["shared"] = {"shards": shards, "num_cpus": 0.1}
    config = AppConfig.model_validate({"model": str(BUNDLED_MODEL), **settings})
    with deployed_app(config, host="127.0.0.1", port=port, say=lambda line: None) as url:
        while len(replica_pids("Ingress")) < ingresses:
            time.sleep(0.2)
        time.sleep(3.0)  # HAProxy learns of a replica some time after it is ready
        yield url


def converse(url: str, number: int) -> list[dict[str, float]]:
    """Runs one conversation. Returns per turn the items, cached items, prompt tokens and cached prompt tokens."""
    picture = encoded(disc("red", (96, 96 + number), (36, 36)))
    messages = [user_message(f"This is conversation {number}. What colour is the circle?", picture)]
    turns = []
    for _ in range(TURNS):
        body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0}
        body |= {"ignore_eos": True, "stage_timings": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
        usage = answer["usage"]
        turns.append(
            {
                "items": 1,
                "items_found": answer["stage_timings"]["embedding_cache_hits"],
                "tokens": usage["prompt_tokens"],
                "tokens_found": usage["prompt_tokens_details"]["cached_tokens"],
            }
        )
        text = answer["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": text}, user_message("And its shape?")]
    return turns


def measure_hits(url: str) -> dict[str, float]:
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        conversations = list(pool.map(lambda number: converse(url, number), range(CONVERSATIONS)))
    total = {name: sum(turn[name] for one in conversations for turn in one) for name in conversations[0][0]}
    return {"items": total["items_found"] / total["items"], "prefixes": total["tokens_found"] / total["tokens"]}


def measure_hit_seconds(url: str) -> list[float]:
    content = user_message("What colour is the circle?", encoded(disc("blue", (256, 256), (80, 80))))["content"]
    times = []
    for number in range(HITS + 10):
        time.sleep(REST_SECONDS)
        answer = ask(url, MODEL, content, 2)
        if number >= 10:  # the first ones warm up
            times.append(answer.ttft)
    return times


def main() -> None:
    options = make_parser(__doc__).parse_args()
    port = free_port()
    checks: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    with local_ray(host="127.0.0.1", port=port, num_cpus=16, say=lambda line: None):
        hits = {}
        for number in NUMBERS:
            with deployed(port, ingresses=number, shards=number, generates=number) as url:
                hits[number] = measure_hits(url)
                print(f"hits with {number}: {hits[number]}", flush=True)
        measured["hits"] = hits
        for kind in ("items", "prefixes"):
            checks[f"hits, {kind}, 4 to 1 replicas"] = at_least(hits[4][kind] / hits[1][kind], 0.95)
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for turn in range(ROUNDS * 2):
            number = 1 + turn % 2
            with deployed(port, ingresses=number, shards=number) as url:
                seconds[number] += measure_hit_seconds(url)
        measured["hit_ms"] = {number: statistics.median(own) * 1e3 for number, own in seconds.items()}
        print(f"hit, ms: {measured['hit_ms']}", flush=True)
        more = measured["hit_ms"][2] - measured["hit_ms"][1]
        checks["a hit through 2 ingresses, more ms"] = at_most(more, MOST_MS)
    publish({"checks": checks, "measured": measured, "machine": this_machine()}, options.output)


if __name__ == "__main__":
    main()
