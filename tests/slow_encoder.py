"""A small checkpoint whose pictures take long to encode, for they are large."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from openai import OpenAI
from PIL import Image

from tests.pictures import encoded, user_message
from tests.small_models import make_checkpoint


def make_slow_checkpoint(folder: Path, side: int) -> str:
    """Encodes a picture of 700 pixels a side in 0.1 s, of 1400 in more than a second."""
    checkpoint = make_checkpoint("qwen2_vl", folder)
    file = Path(checkpoint) / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"] = {"shortest_edge": 3136, "longest_edge": side**2}
    file.write_text(json.dumps(settings))
    return checkpoint


def large_picture(number: int, side: int) -> bytes:
    """Coloured squares that no other number gives."""
    squares = np.random.default_rng(number).integers(0, 256, (side // 20, side // 20, 3), dtype=np.uint8)
    return encoded(Image.fromarray(squares).resize((side, side), Image.Resampling.NEAREST))


def answers_about(
    client: OpenAI, numbers: Sequence[int], side: int, *, at_once: int = 1, tail: bytes = b""
) -> list[str]:
    """Returns what the model `small` says of each picture, so many asked `at_once`. With another `tail` the same
    pictures are other files, and made anew."""

    def ask(number: int) -> Any:
        return client.chat.completions.create(
            model="small",
            messages=[user_message("What?", large_picture(number, side) + tail)],
            temperature=0,
            max_tokens=4,
            extra_body={"ignore_eos": True},
        )

    with ThreadPoolExecutor(at_once) as threads:
        return [one.choices[0].message.content for one in threads.map(ask, numbers)]
