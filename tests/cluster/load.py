"""Clients that ask about pictures, seen and new, for a while.

Run on a host as `python -m tests.cluster.load DOOR SECONDS FOLDER`.

The last line of the output is a JSON object: how many answers were right, and what became of the others."""

import base64
import json
import struct
import sys
import threading
import time
import urllib.request
import zlib
from pathlib import Path
from typing import Any

NUM_CLIENTS = 4
TIMEOUT_SECONDS = 60


def made_new(picture: bytes, name: str) -> bytes:
    """The picture with a comment, by which it is another file: behind the 33 bytes of a PNG's signature and header."""
    content = b"Comment\0" + name.encode()
    check = struct.pack(">I", zlib.crc32(b"tEXt" + content))
    return picture[:33] + struct.pack(">I", len(content)) + b"tEXt" + content + check + picture[33:]


def question(pictures: list[bytes], text: str) -> dict[str, Any]:
    """The body of a request."""
    urls = [f"data:image/png;base64,{base64.b64encode(picture).decode()}" for picture in pictures]
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": text})
    return {"model": "shapes", "messages": [{"role": "user", "content": content}], "temperature": 0}


def ask(door: str, pictures: list[bytes], text: str) -> str:
    body = question(pictures, text)
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{door}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def run(door: str, seconds: float, folder: Path) -> dict[str, Any]:
    questions = json.loads((folder / "questions.json").read_text())
    deadline = time.monotonic() + seconds
    lost: list[str] = []
    num_right = [0] * NUM_CLIENTS

    def repeat(client: int) -> None:
        number = 0
        while time.monotonic() < deadline:
            asked = questions[(client + number) % len(questions)]
            pictures = [(folder / name).read_bytes() for name in asked["pictures"]]
            if number % 2:
                pictures = [made_new(one, f"{time.time()} {client} {number}") for one in pictures]
            started = time.monotonic()
            try:
                answer = ask(door, pictures, asked["question"])
            except Exception as error:  # whatever it is, the request is lost
                answer = repr(error)
            if answer == asked["answer"]:
                num_right[client] += 1
            else:
                lost.append(f"{answer} after {time.monotonic() - started:.1f} s")
            number += 1
            time.sleep(0.1)

    threads = [threading.Thread(target=repeat, args=(client,)) for client in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"num_right": sum(num_right), "lost": lost}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))))
