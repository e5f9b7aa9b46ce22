"""`openai-agents` in both of its modes: each feature by the Responses API and by chat completions."""

from typing import Literal

from agents import (
    Agent,
    AsyncOpenAI,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolOutputImage,
    function_tool,
    set_tracing_disabled,
)
from features import (
    ABOUT_PICTURE,
    AFTER_THOUGHT,
    KEY,
    MODEL,
    PICTURE_URL,
    PLAIN,
    QUESTION,
    SHOWN,
    THINK,
    TOLD,
    URL,
    is_equal,
    report,
)
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
models = [kind(model=MODEL, openai_client=client) for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel)]


class Colour(BaseModel):
    colour: Literal["red"]


@function_tool
def look(where: Literal["left", "right"]) -> str:
    assert where == "left"
    return "red"


def agents(**options):
    return [Agent(name="one", model=model, **options) for model in models]


async def chat():
    for agent in agents():
        is_equal((await Runner.run(agent, QUESTION)).final_output, PLAIN)


async def stream():
    for agent in agents():
        run = Runner.run_streamed(agent, QUESTION)
        deltas = [
            event.data.delta async for event in run.stream_events() if hasattr(getattr(event, "data", 0), "delta")
        ]
        is_equal("".join(deltas), PLAIN)


async def picture():
    parts = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": PICTURE_URL, "detail": "auto"},
    ]
    for agent in agents():
        is_equal((await Runner.run(agent, [{"role": "user", "content": parts}])).final_output, ABOUT_PICTURE)


async def structured():
    for agent in agents(output_type=Colour):
        is_equal((await Runner.run(agent, QUESTION)).final_output, Colour(colour="red"))


async def tools_streamed():
    for agent in agents(tools=[look]):
        run = Runner.run_streamed(agent, QUESTION)
        async for _ in run.stream_events():
            pass
        is_equal(run.final_output, TOLD)


async def tool_picture():
    @function_tool(name_override="look")
    def look_at_picture(where: Literal["left", "right"]) -> ToolOutputImage:
        return ToolOutputImage(image_url=PICTURE_URL)

    # In chat completions this client sends texts of tools only.
    agent, _ = agents(tools=[look_at_picture])
    is_equal((await Runner.run(agent, QUESTION)).final_output, SHOWN)


async def thinking():
    for agent in agents():
        run = await Runner.run(agent, THINK)
        is_equal(run.final_output.strip(), AFTER_THOUGHT)
        assert any(item.type == "reasoning_item" for item in run.new_items), run.new_items


report(chat, stream, picture, structured, tools_streamed, tool_picture, thinking)
