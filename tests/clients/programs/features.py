"""What a client is asked to do, the same for each. It runs in the client's environment: nothing of Raylens is there.

Each program gets the server's URL, a picture's file and the model's folder. It prints what came of each feature as
JSON."""

import asyncio
import base64
import inspect
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

URL, PICTURE_FILE, MODEL_FOLDER = sys.argv[1:4]
KEY, MODEL = "rl-of-the-clients", "scripted"
PICTURE = Path(PICTURE_FILE).read_bytes()
PICTURE_URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"

PLAIN, ABOUT_PICTURE = "It is red.", "A blue circle."
TOLD, SHOWN = "It was told.", "It was shown a picture."
THOUGHT, AFTER_THOUGHT = "It may be green.", "It was green."
QUESTION, THINK = "What colour is it?", "Think. What colour is it?"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
LOOK = {
    "type": "object",
    "properties": {"where": {"type": "string", "enum": ["left", "right"]}},
    "required": ["where"],
    "additionalProperties": False,
}
"""The parameters of the tool `look`, which the model calls with `left`."""
# In OpenAI's form:
SAID = [{"role": "user", "content": QUESTION}]
PARTS = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": LOOK}}
FORM = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA, "strict": True}}


def is_equal(found: object, wanted: object) -> None:
    assert found == wanted, f"{found!r}, not {wanted!r}"


def installed(program: str) -> str:
    """Where this environment has the program."""
    return str(Path(sys.executable).with_name(program))


def run(program: str, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [installed(program), *arguments]
    ran = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=os.environ | variables, check=False
    )
    assert ran.returncode == 0, (ran.stderr or ran.stdout)[-400:]
    return ran


@contextmanager
def serving(program: str, *arguments: str, path: str, **variables: str) -> Iterator[str]:
    """Runs a server of the client's, which gets its port behind `--port`. Yields its URL once `path` answers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [installed(program), *arguments, "--host", "127.0.0.1", "--port", port]
    with subprocess.Popen(command, stdout=sys.stderr, env=os.environ | variables) as server:
        try:
            while not _answers(f"http://127.0.0.1:{port}{path}"):
                assert server.poll() is None, f"{program} has ended"
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _answers(url: str) -> bool:
    try:
        urlopen(url, timeout=5).close()
    except (URLError, ConnectionError, TimeoutError):
        return False
    return True


def report(*features: "Callable[[], object]", **missing: str) -> None:
    """`features`: functions of their names. `missing`: why the client itself cannot do the others."""
    asyncio.run(_report({one.__name__: one for one in features} | missing))


async def _report(features: "dict[str, Callable[[], object] | str]") -> None:
    told = {}
    for name, feature in features.items():
        if isinstance(feature, str):
            told[name] = f"not of the client: {feature}"
            continue
        try:
            await (feature() if inspect.iscoroutinefunction(feature) else asyncio.to_thread(feature))
            told[name] = "ok"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"[:400]
    print(json.dumps(told))
