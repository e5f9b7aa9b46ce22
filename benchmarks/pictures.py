"""Pictures and questions for requests."""

import itertools

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.streaming_client import Content
from tests.pictures import encoded, user_message

_numbers = itertools.count()


def picture(number: int) -> bytes:
    """Returns a JPEG of 1024 x 768 pixels, different for each number."""
    image = Image.new("RGB", (1024, 768), "white")
    x, y = number * 37 % 700, number * 53 % 500
    ImageDraw.Draw(image).ellipse([x, y, x + 200, y + 200], fill=("red", "green", "blue")[number % 3])
    ImageDraw.Draw(image).point((number % 1024, number // 1024), fill="black")
    return encoded(image, "JPEG")


def photograph(width: int, height: int) -> bytes:
    """Returns a JPEG with detail at all scales, like a camera's: about 0.3 bytes a pixel."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = (pixels + random.integers(-8, 9, pixels.shape)).clip(0, 255).astype(np.uint8)
    return encoded(Image.fromarray(noisy), "JPEG", quality=90)


def new_content(kind: str = "text") -> Content:
    """Returns a user message that no other request has. `kind`: "text", "long text" of 900 letters, "unique" for a new
    picture, or "repeated" for the same one."""
    number = next(_numbers)
    pictures = [] if "text" in kind else [picture(0 if kind == "repeated" else number + 1)]
    question = f"Number {number}: what is in the picture, and what is not?"
    message = user_message(question.ljust(900, "?") if kind == "long text" else question, *pictures)
    content: Content = message["content"]
    return content
