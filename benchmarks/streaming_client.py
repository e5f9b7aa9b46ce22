"""A client of `/v1/chat/completions` that uses little CPU, because it runs beside the measured servers."""

import http.client
import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

from PIL import Image, ImageDraw

_TIMEOUT_SECONDS = 600.0

Content = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """One answer of `num_tokens` tokens: seconds from the request to its first text, to its last text, and the gaps
    between its pieces of text. `timings`: the server's own, if the request has `stage_timings`."""

    num_tokens: int
    first: float
    last: float
    gaps: list[float]
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds between tokens. A server may send several tokens in one piece."""
        return (self.last - self.first) / (self.num_tokens - 1)


def picture(number: int) -> bytes:
    """Returns a JPEG of 1024 x 768 pixels, different for each number."""
    image = Image.new("RGB", (1024, 768), "white")
    x, y = number * 37 % 700, number * 53 % 500
    ImageDraw.Draw(image).ellipse([x, y, x + 200, y + 200], fill=("red", "green", "blue")[number % 3])
    ImageDraw.Draw(image).point((number % 1024, number // 1024), fill="black")
    buffer = BytesIO()
    image.save(buffer, "JPEG")
    return buffer.getvalue()


def chat_body(model: str, content: Content, num_tokens: int) -> dict[str, Any]:
    """Returns a request for a stream: a greedy answer of exactly `num_tokens` tokens."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def ask(
    url: str, model: str, content: Content, num_tokens: int, *, api_key: str = "unused", **fields: Any
) -> StreamedAnswer:
    """Streams a greedy answer of exactly `num_tokens` tokens. `fields`: further fields of the request. Raises
    RuntimeError for a wrong answer."""
    body = chat_body(model, content, num_tokens) | fields
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_SECONDS)
    started = time.perf_counter()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{url} answers {response.status}: {response.read().decode()}")
    times, generated, timings = [], None, dict[str, Any]()
    for line in response:
        now = time.perf_counter() - started
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[len(b"data: ") :])
        if any(choice["delta"].get("content") for choice in chunk["choices"]):
            times.append(now)
        if usage := chunk.get("usage"):
            generated = usage["completion_tokens"]
        timings = chunk.get("stage_timings", timings)
    connection.close()
    if generated != num_tokens or not times:
        raise RuntimeError(f"{url} made {generated} tokens in {len(times)} pieces of text, not {num_tokens}")
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return StreamedAnswer(num_tokens, times[0], times[-1], gaps, timings)


def ask_all(
    url: str, model: str, contents: Sequence[Content], num_tokens: int, *, concurrency: int
) -> tuple[list[StreamedAnswer], float]:
    """Sends `concurrency` requests at a time. Returns the answers, and the seconds until the last one ended."""
    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda content: ask(url, model, content, num_tokens), contents))
    return answers, time.perf_counter() - started
