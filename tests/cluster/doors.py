"""Clients at two front doors at once; run on a host as `python -m tests.cluster.doors DOOR DOOR FOLDER`.

Sixteen ask about the same new picture. Then eight read long streams; `begun` is printed when each has a piece. The last
line of the output is a JSON object: the answers, how many of the sixteen had the picture encoded, and how each stream
ended."""

import json
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

from tests.cluster.load import TIMEOUT_SECONDS, made_new, question

NUM_EQUAL, NUM_STREAMS = 16, 8


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)


def ask_equal(doors: list[str], folder: Path) -> tuple[list[str], int]:
    """Returns the answers that are not right, and how many of the requests had the picture encoded."""
    asked = next(one for one in json.loads((folder / "questions.json").read_text()) if len(one["pictures"]) == 1)
    picture = made_new((folder / asked["pictures"][0]).read_bytes(), f"{time.time()}")
    body = question([picture], asked["question"]) | {"stage_timings": True}

    def ask(number: int) -> dict[str, Any]:
        with post(f"{doors[number % 2]}/v1/chat/completions", body) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    with ThreadPoolExecutor(NUM_EQUAL) as threads:
        answers = list(threads.map(ask, range(NUM_EQUAL)))
    texts = [one["choices"][0]["message"]["content"] for one in answers]
    num_encoded = sum("encode" in one["stage_timings"]["seconds"] for one in answers)
    return [text for text in texts if text != asked["answer"]], num_encoded


def read(door: str, number: int, all_begun: threading.Barrier) -> str:
    """Reads a long stream; returns `whole`, the message of its error event, or `cut`."""
    body = {"model": "shapes", "prompt": f"Hello {number}", "max_tokens": 1900, "n": 8, "ignore_eos": True}
    with suppress(IncompleteRead), post(f"{door}/v1/completions", body | {"stream": True}) as response:
        lines = (line.decode().removeprefix("data: ").strip() for line in response)
        next(lines)
        if all_begun.wait() == 0:
            print("begun", flush=True)
        for line in lines:
            if line == "[DONE]":
                return "whole"
            if line and "error" in (event := json.loads(line)):
                return str(event["error"]["message"])
    return "cut"


def run(doors: list[str], folder: Path) -> dict[str, Any]:
    wrong, num_encoded = ask_equal(doors, folder)
    all_begun = threading.Barrier(NUM_STREAMS)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        reading = [threads.submit(read, doors[n % 2], n, all_begun) for n in range(NUM_STREAMS)]
        ends = [one.result() for one in reading]
    return {"wrong": wrong, "num_encoded": num_encoded, "ends": ends}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:3], Path(sys.argv[3]))))
