"""An MCP server, by stdio. Its tool `look` returns a picture, whose file it is started with."""

import sys
from typing import Literal

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("pictures")


@server.tool()
def look(where: Literal["left", "right"]) -> Image:
    """Look there."""
    return Image(path=sys.argv[1])


server.run("stdio")
