"""`pydantic-ai`, with a tool of an MCP server."""

from pathlib import Path

from fastmcp.client.transports import PythonStdioTransport
from features import ABOUT_PICTURE, KEY, MODEL, PICTURE_FILE, QUESTION, URL, is_equal, report
from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

tools = MCPToolset(PythonStdioTransport(Path(__file__).with_name("mcp_server.py"), [PICTURE_FILE]))
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))


async def picture_of_a_tool():
    # It shows the picture in a message of the user behind the tool's.
    is_equal((await Agent(model, toolsets=[tools]).run(QUESTION)).output, ABOUT_PICTURE)


report(picture_of_a_tool)
