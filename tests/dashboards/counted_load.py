"""Requests of every kind to a running application, and what the metrics have to say of them."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from openai import APIStatusError, OpenAI

from raylens.checkpoints import PICTURES
from tests.background import Background
from tests.pictures import disc, encoded, user_message

NUM_TEXTS = 12
NUM_TOKENS = 8
QUESTION = "What colour is the disc?"


@dataclass
class Counts:
    """What the client has seen of the server."""

    answered: Counter[str] = field(default_factory=Counter)
    """By the reason for which they ended."""
    errors: Counter[str] = field(default_factory=Counter)
    """By their code."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    items: int = 0
    downloaded_bytes: int = 0
    uploaded_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, client: OpenAI, message: Any, max_tokens: int = NUM_TOKENS) -> None:
        try:
            answer = client.chat.completions.create(model="shapes", messages=[message], max_tokens=max_tokens)
        except APIStatusError as error:
            with self._lock:
                self.errors[str(error.code)] += 1
            return
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        with self._lock:
            self.answered[answer.choices[0].finish_reason] += 1
            self.prompt_tokens += answer.usage.prompt_tokens
            self.cached_tokens += answer.usage.prompt_tokens_details.cached_tokens or 0
            self.generated_tokens += answer.usage.completion_tokens
            self.items += sum(part["type"] == "image_url" for part in message["content"] if isinstance(part, dict))

    def ask_at_once(self, client: OpenAI, number: int, max_tokens: int = NUM_TOKENS) -> list[threading.Thread]:
        """Starts as many requests, each of which ends its thread."""
        arguments = (client, user_message("Say something."), max_tokens)
        threads = [threading.Thread(target=self.ask, args=arguments) for _ in range(number)]
        for thread in threads:
            thread.start()
        return threads


class LongAnswers(Background):
    """As many clients, one after the other, who ask for answers as long as the context again and again and read them,
    until the block ends."""

    def __init__(self, client: OpenAI, number: int, *, interval_s: float) -> None:
        super().__init__(*(partial(self._read, client, after_s=interval_s * begun) for begun in range(number)))

    def _read(self, client: OpenAI, *, after_s: float) -> None:
        self.is_over.wait(after_s)
        while not self.is_over.is_set():
            with client.completions.create(
                model="shapes", prompt="Hello", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
            ) as stream:
                for _ in stream:
                    if self.is_over.is_set():
                        break


def pictures() -> list[bytes]:
    """In the order in which they are sent: the first again at once, and again after it had to make room."""
    first, *others = [encoded(disc(colour)) for colour in ("red", "blue", "green", "yellow", "black")]
    return [first, first, others[0], first, *others[1:]]


def send_everything(client: OpenAI, counts: Counts) -> None:
    """Sends texts, pictures, one of them by its URL, a file, and requests that are wrong."""
    for _ in range(NUM_TEXTS):
        counts.ask(client, user_message("Say something."))
    for picture in pictures():
        counts.ask(client, user_message(QUESTION, picture))
    with _pictures_over_http() as url:
        part = {"type": "image_url", "image_url": {"url": f"{url}/one.png"}}
        counts.ask(client, {"role": "user", "content": [part, {"type": "text", "text": QUESTION}]})
    counts.downloaded_bytes += (PICTURES / "one.png").stat().st_size
    client.files.create(file=("one.png", pictures()[0]), purpose="vision")
    counts.uploaded_bytes += len(pictures()[0])
    for _ in range(3):
        counts.ask(client, user_message("Say something."), max_tokens=-1)
    counts.ask(client, user_message(QUESTION, b"no picture"))


@contextmanager
def _pictures_over_http() -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(PICTURES))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
