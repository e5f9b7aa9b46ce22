"""Draws the dashboard for docs/: starts the application and a Prometheus, and asks questions for a minute and a half.

    python -m tests.dashboards.pictures

Once a burst of requests finds no room, and once a replica of Encode is killed."""

import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import yaml
from openai import OpenAI
from PIL import Image, ImageDraw

from dashboards.prometheus_api import PrometheusApi
from dashboards.render import TimeRange, picture
from raylens.deployments.config import AppConfig
from raylens.deployments.endpoint.api_keys import hash_key
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import deployed_app, local_ray
from tests.dashboards.counted_load import QUESTION, Counts
from tests.dashboards.prometheus_server import agent_addresses, cluster_config, exporter_address, prometheus
from tests.pictures import encoded, user_message
from tests.replicas import replica_pids

DOCS = Path(__file__).parents[2] / "docs"
KEY = "rl-of-the-pictures"
SECONDS = 90
PICTURES = {
    "dashboard-requests.png": ["Objectives", "Stage waterfall", "Requests"],
    "dashboard-stages.png": ["Ingress", "Shared", "Preprocess", "Encode", "Generate", "Caches", "KV cache"],
    "dashboard-cluster.png": ["Object store", "Replicas", "Errors"],
}


class Clients:
    """Some that chat, some that ask about pictures, and one that is often wrong."""

    def __init__(self, client: OpenAI) -> None:
        self.counts = Counts()
        self._client = client
        self._has_ended = threading.Event()
        kinds = [self._chat] * 3 + [self._look] * 2 + [self._err]
        self._threads = [threading.Thread(target=self._repeat, args=(kind, seed)) for seed, kind in enumerate(kinds)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, kind: object, seed: int) -> None:
        assert callable(kind)
        chance = random.Random(seed)
        while not self._has_ended.wait(chance.expovariate(2)):
            kind(chance)

    def _chat(self, chance: random.Random) -> None:
        text = "Tell me a story of a red disc and a blue square. " * chance.randint(1, 4)
        self.counts.ask(self._client, user_message(text), max_tokens=chance.randint(8, 64))

    def _look(self, chance: random.Random) -> None:
        self.counts.ask(self._client, user_message(QUESTION, _drawn(chance.randint(0, 40))), max_tokens=16)

    def _err(self, chance: random.Random) -> None:
        if chance.random() < 0.3:
            self.counts.ask(self._client, user_message(QUESTION, b"no picture"))


def _drawn(seed: int) -> bytes:
    """One of many pictures."""
    chance = random.Random(seed)
    image = Image.new("RGB", (240, 240), "white")
    x, y = chance.randint(0, 160), chance.randint(0, 160)
    ImageDraw.Draw(image).rectangle((x, y, x + 60, y + 60), fill=chance.choice(["red", "green", "blue", "black"]))
    return encoded(image)


def main() -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as name, local_ray(host="127.0.0.1", port=port, num_cpus=8):
        folder = Path(name)
        with deployed_app(_config(folder), host="127.0.0.1", port=port) as url:
            client = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)
            config = cluster_config(folder, exporter=exporter_address(), agents=agent_addresses())
            with prometheus(folder, config) as api:
                start = time.time() + 3
                time.sleep(3)
                _make_load(client)
                _draw(api, TimeRange(start, time.time(), "10s"))


def _config(folder: Path) -> AppConfig:
    keys = folder / "keys.yaml"
    keys.write_text(yaml.safe_dump([{"name": "docs", "sha256": hash_key(KEY)}]))
    return AppConfig.model_validate(
        {
            "model": "checkpoints/shapes",
            "auth": {"keys_file": str(keys)},
            "metrics": {"port": 0},
            "shared": {"embedding_cache_bytes": 600_000},
            "admission": {
                "max_queued_requests": 4,
                "total": {"requests": 16, "bytes": 2**30, "pixels": 2**31, "tokens": 2**22},
            },
        }
    )


def _make_load(client: OpenAI) -> None:
    with Clients(client) as clients:
        time.sleep(SECONDS / 3)
        burst = clients.counts.ask_at_once(client, 40, max_tokens=32)
        time.sleep(SECONDS / 3)
        os.kill(replica_pids("Encode")[0], signal.SIGKILL)
        time.sleep(SECONDS / 3)
    for thread in burst:
        thread.join()


def _draw(api: PrometheusApi, span: TimeRange) -> None:
    for name, rows in PICTURES.items():
        picture(api, rows, span).savefig(DOCS / name)


if __name__ == "__main__":
    main()
