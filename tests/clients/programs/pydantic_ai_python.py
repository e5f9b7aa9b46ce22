"""`pydantic-ai`: agents, by chat completions."""

from typing import Literal

from features import (
    ABOUT_PICTURE,
    AFTER_THOUGHT,
    KEY,
    MODEL,
    PICTURE,
    PLAIN,
    QUESTION,
    THINK,
    THOUGHT,
    TOLD,
    URL,
    is_equal,
    report,
)
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))
shown = BinaryContent(PICTURE, media_type="image/png")


class Colour(BaseModel):
    colour: Literal["red"]


async def chat():
    is_equal((await Agent(model).run(QUESTION)).output, PLAIN)


async def stream():
    async with Agent(model).run_stream(QUESTION) as run:
        is_equal("".join([piece async for piece in run.stream_text(delta=True)]), PLAIN)


async def picture():
    is_equal((await Agent(model).run([QUESTION, shown])).output, ABOUT_PICTURE)


async def structured():
    for output in (NativeOutput(Colour), Colour):
        is_equal((await Agent(model, output_type=output).run(QUESTION)).output, Colour(colour="red"))


def agent_with_tool(result):
    agent = Agent(model)

    @agent.tool_plain
    def look(where: Literal["left", "right"]):
        assert where == "left"
        return result

    return agent


async def tools_streamed():
    async with agent_with_tool("red").run_stream(QUESTION) as run:
        is_equal(await run.get_output(), TOLD)


async def tool_picture():
    # It shows the picture in a message of the user behind the tool's.
    is_equal((await agent_with_tool(shown).run(QUESTION)).output, ABOUT_PICTURE)


async def thinking():
    run = await Agent(model).run(THINK)
    is_equal(run.output.strip(), AFTER_THOUGHT)
    thoughts = [
        part.content for message in run.all_messages() for part in message.parts if isinstance(part, ThinkingPart)
    ]
    is_equal([thought.strip() for thought in thoughts], [THOUGHT])


report(chat, stream, picture, structured, tools_streamed, tool_picture, thinking)
