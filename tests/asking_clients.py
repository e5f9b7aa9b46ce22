"""Clients that ask about ever new pictures, one request after the other, and note what comes back."""

import threading
import time
from functools import partial

from openai import APIError, OpenAI

from tests.background import Background
from tests.pictures import disc, encoded, user_message

COLOURS = ["red", "green", "blue"]


class AskingClients(Background):
    """They ask until the block ends. `wrong`: what was answered wrong. `errors`: requests without an answer, with their
    time by `time.monotonic`."""

    def __init__(self, client: OpenAI, num_clients: int = 4) -> None:
        super().__init__(*(partial(self._run, index) for index in range(num_clients)))
        self._client = client
        self._lock = threading.Lock()
        self.wrong: list[str] = []
        self.errors: list[tuple[float, str]] = []
        self.num_right = 0

    def wait_for(self, num_right: int, timeout: float) -> None:
        """Waits until that many more requests were answered right."""
        target = self.num_right + num_right
        deadline = time.monotonic() + timeout
        while self.num_right < target:
            assert time.monotonic() < deadline, f"only {self.num_right} of {target} answers, errors: {self.errors}"
            time.sleep(0.05)

    def _run(self, index: int) -> None:
        for number in range(10_000):
            if self.is_over.is_set():
                return
            colour = COLOURS[(index + number) % len(COLOURS)]
            size = (96 + number % 50, 96 + index + 10 * (number // 50))
            message = user_message("What colour is the circle?", encoded(disc(colour, size, (36, 36))))
            try:
                completion = self._client.chat.completions.create(model="shapes", messages=[message])
            except APIError as error:
                with self._lock:
                    self.errors.append((time.monotonic(), repr(error)))
                time.sleep(0.2)
                continue
            answer = completion.choices[0].message.content
            with self._lock:
                self.num_right += answer == colour
                if answer != colour:
                    self.wrong.append(f"{answer} for {colour}")
