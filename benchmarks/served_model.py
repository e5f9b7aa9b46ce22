"""A server of the bundled model, requests for it, and the CPU time of its processes."""

import itertools
import json
import os
import string
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.pictures import photograph
from benchmarks.server_process import Server, cpu_seconds, running_serve, thread_cpu_seconds, tree_of
from benchmarks.streaming_client import Answer, Content, Sending, send_all
from raylens.checkpoints import BUNDLED_MODEL
from tests.pictures import user_message

MODEL = "shapes"
SETTINGS: dict[str, Any] = {
    "served_model_name": MODEL,
    "preprocess": {"max_replicas": 1},  # a second one would start during the measurement, and have no core
    "num_threads": 1,
    "generate": {"engine": {"prompt_lookup": False}},
}
"""One thread per step and batch, and one token per step, as in the simulation."""
SIZES = {0.3: (640, 480), 0.8: (1024, 768), 2.1: (1920, 1088)}
"""Pictures by size in megapixels."""
ROLES = ("client", "proxy", "ingress", "shared", "preprocess", "encode", "generate", "engine", "controller", "beside")
"""Roles of CPU time. `engine`: the engine's thread of Generate; `generate`: its other threads."""

Seconds = dict[str, float]
_numbers = itertools.count(time.time_ns() // 1000 % 10**8)
_TICKS = os.sysconf("SC_CLK_TCK")


@cache
def letters() -> list[int]:
    """Returns the tokens of lower-case letters. Each of these tokens is visible text at once. Parts of characters and
    control tokens have no text, so the client would see the first token late."""
    vocabulary = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary[letter] for letter in string.ascii_lowercase]


def sending(moment: float, content: Content, num_tokens: int) -> Sending:
    return Sending.of(moment, MODEL, content, num_tokens, allowed_token_ids=letters(), stage_timings=True)


def megapixels(size: float) -> float:
    width, height = SIZES[size]
    return width * height / 1e6


@cache
def _photo(size: float) -> bytes:
    return photograph(*SIZES[size])


def question(pictures: Sequence[tuple[float, int | None]], num_words: int = 6) -> Content:
    """Returns a request's content: pictures, each by its size and number, and a text of new words. A picture with the
    number None differs from all others."""
    # Decoders ignore bytes after the picture's end.
    photos = [_photo(size) + f"{next(_numbers) if number is None else -number}".encode() for size, number in pictures]
    words = " ".join(f"{next(_numbers) % 10**8:08d}" for _ in range(num_words))
    content: Content = user_message(words, *photos)["content"]
    return content


class ServedModel:
    def __init__(self, url: str, server: Server) -> None:
        self.url = url
        self._root = server.pid
        self._engine_thread: int | None = None
        self._roles: dict[int, str] = {}

    def ask(self, content: Content, num_tokens: int) -> tuple[Answer, float]:
        """Sends one request and waits for its answer. Returns the answer and the client's CPU seconds."""
        (answer,), cpu = send_all(self.url, [sending(0.0, content, num_tokens)])
        return answer, cpu

    def cpu(self) -> Seconds:
        """Returns the CPU seconds so far of each role except the client, and of `machine`, all programs."""
        used = dict.fromkeys(ROLES, 0.0)
        for pid in tree_of(self._root):
            with suppress(OSError):  # ended meanwhile
                used[self._role(pid)] += cpu_seconds(pid)
                if self._role(pid) == "generate":
                    used["engine"] += self._engine_seconds(pid)
        used["generate"] -= used["engine"]
        used["machine"] = _machine_seconds()
        return used

    def _role(self, pid: int) -> str:
        if pid not in self._roles:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[0]
            self._roles[pid] = _role_of(command)
        return self._roles[pid]

    def _engine_seconds(self, pid: int) -> float:
        """Returns the seconds of the busiest thread, which is the engine's since the warm-up."""
        threads = thread_cpu_seconds(pid)
        if self._engine_thread is None:
            self._engine_thread = max((thread for thread in threads if thread != pid), key=lambda one: threads[one])
        return threads[self._engine_thread]


def _role_of(command: str) -> str:
    for stage in ("Ingress", "Shared", "Preprocess", "Encode", "Generate"):
        if f":{stage}" in command:
            return stage.lower()
    if "ServeController" in command:
        return "controller"
    return "proxy" if "haproxy" in command and "ray::" not in command else "beside"


def _machine_seconds() -> float:
    """Returns the CPU seconds of all programs of the machine (proc(5), the first line of stat)."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS


@contextmanager
def served_bundled_model() -> Iterator[ServedModel]:
    """Serves the bundled model with SETTINGS, warmed up."""
    with running_serve({"model": str(BUNDLED_MODEL), **SETTINGS}) as (url, server):
        model = ServedModel(url, server)
        for turn in range(30):
            model.ask(question([(0.3, None)] if turn % 2 else []), 64)
        yield model
