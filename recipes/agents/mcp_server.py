"""An MCP server with one tool, the calculator, over HTTP: python mcp_server.py PORT"""

from __future__ import annotations

import ctypes
import signal
import sys

from calculator import calculate
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PR_SET_PDEATHSIG = 1
server = MCPServer("calculator")


@server.tool()
def calculator(expression: str) -> str:
    """Work out a product."""
    try:
        return calculate(expression)
    except ValueError as error:
        raise ToolError(str(error)) from error


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the process that started it
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
