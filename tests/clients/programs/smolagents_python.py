"""`smolagents`: the model behind its agents."""

import io

from features import ABOUT_PICTURE, FORM, KEY, MODEL, PICTURE, PLAIN, QUESTION, URL, is_equal, report
from PIL import Image
from smolagents import OpenAIServerModel, Tool
from smolagents.models import agglomerate_stream_deltas

model = OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY)
said = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


class Look(Tool):
    name = "look"
    description = "Look there."
    inputs = {"where": {"type": "string", "description": "left or right", "enum": ["left", "right"]}}
    output_type = "string"

    def forward(self, where):
        return "red"


def chat():
    is_equal(model(said).content, PLAIN)


def stream():
    is_equal("".join(delta.content or "" for delta in model.generate_stream(said)), PLAIN)


def picture():
    image = Image.open(io.BytesIO(PICTURE))
    parts = [{"type": "text", "text": QUESTION}, {"type": "image", "image": image}]
    is_equal(model([{"role": "user", "content": parts}]).content, ABOUT_PICTURE)


def structured():
    is_equal(model(said, response_format=FORM).content.replace(" ", ""), '{"colour":"red"}')


def tools_streamed():
    deltas = list(model.generate_stream(said, tools_to_call_from=[Look()], tool_choice="auto"))
    (call,) = agglomerate_stream_deltas(deltas).tool_calls
    is_equal((call.function.name, call.function.arguments.replace(" ", "")), ("look", '{"where":"left"}'))


report(
    chat,
    stream,
    picture,
    structured,
    tools_streamed,
    tool_picture="it keeps pictures of tools as variables",
    thinking="it drops them",
)
