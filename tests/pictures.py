"""Pictures made on the spot, and what a chat message holds of them."""

import io
from typing import Any

from PIL import Image, ImageDraw

from raylens.deployments.launch.demo import picture_part


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture file."""
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def disc(colour: str, size: tuple[int, int] = (128, 128), corner: tuple[int, int] = (8, 8)) -> Image.Image:
    """A coloured disc on white, a quarter of the picture wide."""
    image = Image.new("RGB", size, "white")
    width = min(size) // 4
    ImageDraw.Draw(image).ellipse([*corner, corner[0] + width, corner[1] + width], fill=colour)
    return image


def user_message(text: str, *pictures: bytes) -> Any:
    """A user's turn in OpenAI's form: the pictures, then the text."""
    parts = [picture_part(picture) for picture in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
