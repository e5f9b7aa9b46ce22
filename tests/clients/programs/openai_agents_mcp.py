"""`openai-agents`, with a tool of an MCP server, by the Responses API."""

import sys
from pathlib import Path

from agents import Agent, AsyncOpenAI, OpenAIResponsesModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStdio
from features import KEY, MODEL, PICTURE_FILE, QUESTION, SHOWN, URL, is_equal, report

set_tracing_disabled(True)
model = OpenAIResponsesModel(model=MODEL, openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY))
server = {"command": sys.executable, "args": [str(Path(__file__).with_name("mcp_server.py")), PICTURE_FILE]}


async def picture_of_a_tool():
    async with MCPServerStdio(server) as tools:
        is_equal((await Runner.run(Agent("one", model=model, mcp_servers=[tools]), QUESTION)).final_output, SHOWN)


report(picture_of_a_tool)
