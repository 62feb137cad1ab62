"""An MCP server with the tools of a shop, over its standard streams, or over HTTP on a port that it prints."""

import asyncio
import json
import os
import socket
import sys

import uvicorn
from mcp.server import MCPServer

server = MCPServer("shop")


@server.tool()
def look(item: str) -> str:
    """The price of an item."""
    return str(json.loads(os.environ["PRICES"]).get(item, f"error: no {item}"))


@server.tool()
def multiply(a: int, b: int) -> str:
    """The product of two numbers."""
    return str(a * b)


async def serve_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(server.streamable_http_app(), log_level="error")
        await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    if sys.argv[1:] == ["stdio"]:
        server.run("stdio")
    else:
        asyncio.run(serve_http())
