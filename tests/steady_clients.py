"""Clients that ask and read on and on, whatever happens to the server, and note what comes back."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
from openai import APIError, OpenAI

from tests.background import Background
from tests.pictures import disc, encoded, user_message

COLOURS = ["red", "green", "blue"]


class SteadyClients(Background):
    """Three clients with ever new pictures and two with long streams, until the block ends.

    `wrong`: what was answered wrong or not at all, after `max_retries` of OpenAI's client. `broken`: when streams ended
    before their end, in seconds of `time.monotonic`, and how: by an error event or without one."""

    def __init__(self, url: str, *, num_answers: int, max_retries: int = 0) -> None:
        """`num_answers`: of a stream, which make it long."""
        asking = [partial(self._repeat, self._ask, number) for number in range(3)]
        reading = [partial(self._repeat, self._read, number) for number in range(2)]
        super().__init__(*asking, *reading)
        self._client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=max_retries, timeout=300)
        self._num_answers = num_answers
        self.num_short = self.num_long = 0
        self.longest_stream = 0.0
        self.wrong: list[str] = []
        self.broken: list[tuple[float, str]] = []

    def _repeat(self, act: Callable[[int, int], None], client: int) -> None:
        number = 0
        while not self.is_over.is_set():
            try:
                act(client, number)
            except (APIError, httpx.HTTPError) as error:
                self.wrong.append(repr(error))
            number += 1
            time.sleep(0.05)

    def _ask(self, client: int, number: int) -> None:
        colour = COLOURS[number % 3]
        # Of sizes that the model is sure of. What follows a picture's end makes it another file.
        picture = encoded(disc(colour, (96 + number % 50, 96 + client), (36, 36))) + f"{client} {number}".encode()
        message = user_message("What colour is the circle?", picture)
        completion = self._client.chat.completions.create(model="shapes", messages=[message], temperature=0)
        if (answer := completion.choices[0].message.content) != colour:
            self.wrong.append(f"{answer} for {colour}")
        self.num_short += 1

    def _read(self, client: int, number: int) -> None:
        started = time.monotonic()
        stream: Any = self._client.completions.create(
            model="shapes",
            prompt=f"Hello {client} {number}",
            stream=True,
            max_tokens=1900,
            n=self._num_answers,
            extra_body={"ignore_eos": True, "seed": 1},
        )
        reasons: list[str] = []
        try:
            reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices[0].finish_reason]
        except APIError as error:
            self.broken.append((time.monotonic(), f"event: {error.message}"))
            return
        except httpx.HTTPError as error:
            self.broken.append((time.monotonic(), repr(error)))
            return
        if reasons != ["length"] * self._num_answers:
            self.wrong.append(f"a stream of {len(reasons)} answers: {reasons}")
        self.num_long += 1
        self.longest_stream = max(self.longest_stream, time.monotonic() - started)
