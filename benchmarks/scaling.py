"""How soon each stage scales up when work comes, and down when it has gone, and whether anybody notices.

    python -m benchmarks.scaling [--seconds 40] [--output FILE]

The real application with the bundled model: each stage may have one replica or two, Encode none at rest. Targets are
so low that the load needs two of each. The load comes at once and stays for `--seconds`: 6 clients that ask about ever
new photographs of 1.5 megapixels, and 8 that read long streams. Then it ends, and stages may stop replicas after 5 s
of rest.

Ray Serve decides as often as on a cluster. Of each stage, in seconds: `decided`, from the begin of the load to the
first sign of another replica in Ray Serve's status; `running`, until that replica takes work; `stopped`, from the end
of the load until no more replicas run than at rest. `lost` counts requests without a whole answer. The last line is
one JSON document."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from PIL import Image
from ray import serve

from benchmarks.document import at_most, publish, this_machine
from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import APP_NAME, free_port, running_app
from raylens.deployments.ray_internals.environment import RAY_ENVIRONMENT
from raylens.preprocess.data_url import data_url
from tests.background import Background

PICTURE_CLIENTS, STREAM_CLIENTS = 6, 8
AT_REST = {"Ingress": 1, "Preprocess": 1, "Encode": 0, "Generate": 1}
MOST = 2
CONTROL_LOOP = "RAY_SERVE_CONTROL_LOOP_INTERVAL_S"
"""One machine sets it higher than a cluster, to rest more."""
DECIDED_SECONDS = 2.0
_POLL_SECONDS = 0.1
_REST_SECONDS = 180.0


def config() -> AppConfig:
    targets: dict[str, dict[str, Any]] = {
        "ingress": {"num_cpus": 0.1, "target_requests": 5},
        "preprocess": {"target_megapixels": 1},
        "encode": {"target_batches": 0.02},
        "generate": {"target_usage": 0.05},
    }
    for stage, settings in targets.items():
        settings |= {"min_replicas": AT_REST[stage.capitalize()], "max_replicas": MOST}
    settings = {"model": str(BUNDLED_MODEL), "scaling": {"downscale_delay_s": 5}, **targets}
    return AppConfig.model_validate(settings | {"shared": {"num_cpus": 0.1}, "updates": {"drain_seconds": 120}})


class ReplicaCounts(Background):
    """Watches how many replicas each stage has: when there is one more than at rest, starting and running, and when
    there is none any more."""

    def __init__(self) -> None:
        super().__init__(self._watch)
        self.events: dict[str, dict[str, float]] = {stage: {} for stage in AT_REST}

    def are_at_rest(self) -> bool:
        return all("stopped" in events for events in self.events.values())

    def _watch(self) -> None:
        while not self.is_over.is_set():
            deployments = serve.status().applications[APP_NAME].deployments
            now = time.monotonic()
            for stage, events in self.events.items():
                states = deployments[stage].replica_states
                self._note(events, now, states.get("RUNNING", 0), sum(states.values()), AT_REST[stage])
            time.sleep(_POLL_SECONDS)

    def _note(self, events: dict[str, float], now: float, num_running: int, num_all: int, at_rest: int) -> None:
        if num_all > at_rest:
            events.setdefault("decided", now)
        if num_running > at_rest:
            events.setdefault("running", now)
            events.pop("stopped", None)
        elif "running" in events:
            events.setdefault("stopped", now)


class Load(Background):
    """The clients, until the block ends; and how many of their requests were answered, and lost."""

    def __init__(self, url: str) -> None:
        acts = [*[self._ask] * PICTURE_CLIENTS, *[self._read] * STREAM_CLIENTS]
        super().__init__(*(partial(self._repeat, act, number) for number, act in enumerate(acts)))
        self._url = url
        self._photograph = _photograph()
        self.num_answered, self.lost = 0, list[str]()

    def _repeat(self, act: Callable[[httpx.Client, int], None], client: int) -> None:
        number = 0
        with httpx.Client(base_url=self._url, timeout=300) as connection:
            while not self.is_over.is_set():
                try:
                    act(connection, client * 1_000_000 + number)
                    self.num_answered += 1
                except (httpx.HTTPError, ValueError) as error:
                    self.lost.append(repr(error))
                number += 1

    def _ask(self, connection: httpx.Client, number: int) -> None:
        url = data_url(self._photograph + number.to_bytes(8))  # what follows its end makes it another file
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        body = {"model": "shapes", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        connection.post("/v1/chat/completions", json=body).raise_for_status()

    def _read(self, connection: httpx.Client, number: int) -> None:
        body = {"model": "shapes", "prompt": f"Hello {number}", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with connection.stream("POST", "/v1/completions", json=body) as response:
            lines = list(response.raise_for_status().iter_lines())
        if not any('"finish_reason":"length"' in line for line in lines):
            raise ValueError(f"a stream that ends with {lines[-4:]}")


def _photograph() -> bytes:
    buffer = BytesIO()
    Image.effect_noise((1500, 1000), 32).convert("RGB").save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


@contextmanager
def served() -> Iterator[str]:
    with (
        mock.patch.dict(os.environ, {CONTROL_LOOP: RAY_ENVIRONMENT[CONTROL_LOOP]}),
        running_app(config(), host="127.0.0.1", port=free_port(), say=lambda line: None) as url,
    ):
        yield url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of load, default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    with served() as url, ReplicaCounts() as counts:
        time.sleep(3.0)
        began = time.monotonic()
        with Load(url) as load:
            time.sleep(options.seconds)
        ended = time.monotonic()
        while not counts.are_at_rest() and time.monotonic() < ended + _REST_SECONDS:
            time.sleep(1.0)
    seconds = {
        stage: {name: round(at - (ended if name == "stopped" else began), 1) for name, at in events.items()}
        for stage, events in counts.events.items()
    }
    for stage, own in seconds.items():
        print(f"{stage}: {own}")
    print(f"{load.num_answered} answers; lost: {load.lost}")
    missing = 999.0
    checks: dict[str, Any] = {
        f"{stage}, seconds to decide": at_most(own.get("decided", missing), DECIDED_SECONDS)
        for stage, own in seconds.items()
    }
    checks |= {
        f"{stage}, seconds to stop": at_most(own.get("stopped", missing), _REST_SECONDS)
        for stage, own in seconds.items()
    }
    checks["lost"] = at_most(len(load.lost), 0)
    publish({"checks": checks, "seconds": seconds, "machine": this_machine()}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
