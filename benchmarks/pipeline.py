"""Latency and throughput of the whole pipeline over HTTP, on the bundled model.

    python -m benchmarks.pipeline [--requests 48] [--output FILE]

Each scenario streams answers of 32 tokens at a fixed concurrency. `new pictures` sends every picture once, `one
picture` the same one in every request, so the difference is what the caches save. The last line is one JSON document.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from openai import OpenAI
from PIL import Image, ImageDraw

from checkpoints import BUNDLED_MODEL
from deployments.config import AppConfig
from deployments.demo import picture_part
from deployments.local_cluster import free_port, running_app

NUM_TOKENS = 32
CONCURRENCIES = (1, 8)


@dataclass(frozen=True, slots=True)
class Measured:
    """One streamed answer: seconds to its first token, gaps between the later pieces, and in all."""

    time_to_first_token: float
    gaps: list[float]
    total: float


def picture(number: int) -> bytes:
    """A JPEG of 1024 x 768 pixels that no other number gives."""
    image = Image.new("RGB", (1024, 768), "white")
    x, y = number * 37 % 700, number * 53 % 500
    ImageDraw.Draw(image).ellipse([x, y, x + 200, y + 200], fill=("red", "green", "blue")[number % 3])
    ImageDraw.Draw(image).point((number % 1024, number // 1024), fill="black")
    buffer = BytesIO()
    image.save(buffer, "JPEG")
    return buffer.getvalue()


def ask(client: OpenAI, content: list[Any]) -> Measured:
    started = last = time.perf_counter()
    first: float | None = None
    gaps = []
    stream: Any = client.chat.completions.create(
        model="shapes",
        messages=[{"role": "user", "content": content}],
        stream=True,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        now = time.perf_counter()
        if not chunk.choices[0].delta.content:
            continue
        if first is None:
            first = now - started
        else:
            gaps.append(now - last)
        last = now
    return Measured(first or last - started, gaps, last - started)


def run_scenario(client: OpenAI, contents: list[list[Any]], concurrency: int) -> dict[str, float]:
    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda content: ask(client, content), contents))
    seconds = time.perf_counter() - started
    gaps = [gap for answer in answers for gap in answer.gaps]
    return {
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": len(answers) * NUM_TOKENS / seconds,
        "ttft_ms_p50": statistics.median(answer.time_to_first_token for answer in answers) * 1e3,
        "gap_ms_p50": statistics.median(gaps) * 1e3,
        "gap_ms_p99": statistics.quantiles(gaps, n=100)[98] * 1e3,
    }


def measure(url: str, num_requests: int) -> dict[str, dict[str, float]]:
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=300)
    question = {"type": "text", "text": "Describe the picture."}
    fresh = iter(range(10**6))
    results = {}
    for concurrency in CONCURRENCIES:
        scenarios: dict[str, list[list[Any]]] = {
            "text": [[question]] * num_requests,
            "new pictures": [[picture_part(picture(next(fresh))), question] for _ in range(num_requests)],
            "one picture": [[picture_part(picture(0)), question]] * num_requests,
        }
        for name, contents in scenarios.items():
            run_scenario(client, contents[:concurrency], concurrency)  # warm-up
            key = f"{name}, {concurrency} at once"
            results[key] = run_scenario(client, contents[concurrency:] or contents, concurrency)
            print(f"{key:28}", "  ".join(f"{metric} {value:8.1f}" for metric, value in results[key].items()))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48, help="requests of each scenario (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the JSON document there")
    args = parser.parse_args()
    with running_app(AppConfig(model=str(BUNDLED_MODEL)), host="127.0.0.1", port=free_port()) as url:
        results = measure(url, args.requests)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, no GPU, Python {platform.python_version()}"
    document = json.dumps({"machine": machine, "model": "shapes", "scenarios": results})
    if args.output:
        args.output.write_text(document + "\n")
    print(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
