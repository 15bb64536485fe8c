"""An MCP server for tests, over standard input and output, or over HTTP at a given port."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
kept: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a note, and give all notes so far."""
    kept.append(text)
    return ", ".join(kept)


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
def sleep(seconds: float) -> str:
    """Take long."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def pid() -> int:
    """Tell the process."""
    return os.getpid()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
