"""An agent that uses the tools of an MCP server: it learns their schemas from the server, and calls them there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import mcp
from openai import AsyncOpenAI
from tidemill.recipes.agents.calculator import STOP, outcome

URL = "TIDEMILL_CALCULATOR_URL"


async def solve(base_url, api_key, task, most=3):
    messages, calls = [{"role": "user", "content": task["prompt"]}], 0
    async with (
        mcp.Client(os.environ[URL]) as server,
        AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client,
    ):
        tools = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.input_schema},
            }
            for t in (await server.list_tools()).tools
        ]
        for _ in range(most):
            made = await client.chat.completions.create(model="policy", messages=messages, tools=tools, stop=STOP)
            said = made.choices[0].message
            messages.append(said)
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                calls += 1
                result = await called(server, call.function)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return outcome(task, said.content, calls)


async def called(server, function):
    try:
        made = await server.call_tool(function.name, json.loads(function.arguments), read_timeout_seconds=10)
    except (ValueError, TypeError, mcp.MCPError) as error:
        return f"error: {error}"
    return "\n".join(part.text for part in made.content if part.type == "text")


def prepare(**args):
    """Start the server once, for all samples; it ends with this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("mcp_server.py")), str(port)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the calculator's server did not start") from None
            time.sleep(0.05)
    os.environ[URL] = f"http://127.0.0.1:{port}/mcp"


solve.prepare = prepare
