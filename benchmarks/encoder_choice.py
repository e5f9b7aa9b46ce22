"""Where should pictures be encoded? `encoder: inline`, `separate` and `auto`, under a light, a mixed and a heavy load.

    python -m benchmarks.encoder_choice [--seconds 20] [--output FILE]

A small model whose pictures of 700 x 700 pixels take about 0.1 s of a core to encode. In turn, each of the three serves
these loads:

- few: one client asks about ever new pictures.
- beside answers: the same, while eight clients read long answers.
- burst: 32 new pictures come at once, three times.

Of each, the mean seconds from a question about a picture to its answer of one token, and the tokens that the readers
got in a second. The last line is one JSON document."""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI

from benchmarks.document import at_least, at_most, publish, this_machine
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import free_port, running_app
from tests.background import Background
from tests.pictures import user_message
from tests.slow_encoder import large_picture, make_slow_checkpoint

ENCODERS = ("inline", "separate", "auto")
SIDE = 700
NUM_READERS = 8
BURST, NUM_BURSTS = 32, 3
MOST_WAIT = 1.15
"""How long a picture may take with `auto`, in that with the better of the others."""
LEAST_TOKENS = 0.9
"""The tokens of readers with `auto`, in those with the better of the others."""


class Client:
    """Asks a server about pictures that no other question had."""

    def __init__(self, url: str) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=300)
        self._picture = large_picture(0, SIDE)
        self._numbers = itertools.count()
        self.num_tokens = 0

    def ask(self, _: int = 0) -> float:
        """Returns the seconds until the answer."""
        # What follows a picture's end makes it another file.
        message = user_message("What?", self._picture + str(next(self._numbers)).encode())
        started = time.perf_counter()
        self._client.chat.completions.create(model="small", messages=[message], max_tokens=1)
        return time.perf_counter() - started

    def read(self, readers: Background) -> None:
        """Reads long answers until the block of `readers` ends."""
        while not readers.is_over.is_set():
            stream: Any = self._client.completions.create(
                model="small",
                prompt=f"Hello {next(self._numbers)}",
                stream=True,
                max_tokens=400,
                extra_body={"ignore_eos": True},
            )
            for _ in stream:
                self.num_tokens += 1
                if readers.is_over.is_set():
                    stream.close()
                    break


def measured(encoder: str, checkpoint: str, seconds: float) -> dict[str, float]:
    settings = {"model": checkpoint, "served_model_name": "small", "encoder": encoder}
    with running_app(AppConfig.model_validate(settings), host="127.0.0.1", port=free_port()) as url:
        client = Client(url)
        for _ in range(5):
            client.ask()
        few = statistics.mean(asked_for(client, seconds))
        beside, tokens_per_s = beside_readers(client, seconds)
        bursts = [one for _ in range(NUM_BURSTS) for one in burst(client)]
    return {
        "few, s": few,
        "beside answers, s": beside,
        "beside answers, tokens/s": tokens_per_s,
        "burst, s": statistics.mean(bursts),
    }


def asked_for(client: Client, seconds: float) -> Iterator[float]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield client.ask()


def beside_readers(client: Client, seconds: float) -> tuple[float, float]:
    """Returns the mean time of a picture, and the readers' tokens per second."""
    readers: Background

    def read() -> None:
        client.read(readers)

    readers = Background(*[read] * NUM_READERS)
    with readers:
        time.sleep(2)
        before, started = client.num_tokens, time.perf_counter()
        mean = statistics.mean(asked_for(client, seconds))
        return mean, (client.num_tokens - before) / (time.perf_counter() - started)


def burst(client: Client) -> list[float]:
    time.sleep(2)  # whoever scales has settled
    with ThreadPoolExecutor(BURST) as threads:
        return list(threads.map(client.ask, range(BURST)))


def checks_of(results: dict[str, dict[str, float]]) -> dict[str, Any]:
    def ratio(name: str, best: Any) -> float:
        return results["auto"][name] / float(best(results[encoder][name] for encoder in ("inline", "separate")))

    waits = {name: at_most(ratio(name, min), MOST_WAIT) for name in results["auto"] if name.endswith(", s")}
    tokens = "beside answers, tokens/s"
    return {**waits, tokens: at_least(ratio(tokens, max), LEAST_TOKENS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a load, default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_slow_checkpoint(Path(folder), SIDE)
        results = {encoder: measured(encoder, checkpoint, options.seconds) for encoder in ENCODERS}
    for encoder, found in results.items():
        print(encoder, {name: round(value, 3) for name, value in found.items()})
    checks = checks_of(results)
    publish({"checks": checks, "measured": results, "machine": this_machine()}, options.output)
    return 0 if all(check["ok"] for check in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
