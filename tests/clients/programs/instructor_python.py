"""`instructor`: objects by tools and by a schema."""

from typing import Literal

import instructor
from features import KEY, MODEL, PICTURE_URL, QUESTION, SAID, URL, is_equal, report
from instructor.processing.multimodal import Image
from openai import OpenAI
from pydantic import BaseModel


class Colour(BaseModel, extra="forbid"):
    colour: Literal["red"]


def client(mode):
    return instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=mode)


def structured():
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        answer = client(mode).chat.completions.create(model=MODEL, messages=SAID, response_model=Colour)
        is_equal(answer.colour, "red")


def stream():
    partial = client(instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, messages=SAID, response_model=Colour
    )
    is_equal(list(partial)[-1].colour, "red")


def picture():
    parts = [QUESTION, Image.from_base64(PICTURE_URL)]
    answer = client(instructor.Mode.TOOLS).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], response_model=Colour
    )
    is_equal(answer.colour, "red")


only = "its answers are objects"


def tools_streamed():
    stream()


report(stream, picture, structured, tools_streamed, chat=only, tool_picture=only, thinking=only)
