"""Tools of MCP servers, over standard input and output or over HTTP, through the official SDK.

A session stays open over calls: one for all conversations of a process, or one for each (`session: own`). A server that
ends is started again by the next call. Sessions live in an asyncio loop of their own, in one thread per process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import shlex
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from tidemill.environment.tools.api import Tool
from tidemill.errors import ConfigError, MissingExtra

logger = logging.getLogger(__name__)
GRACE_S = 5.0  # beyond a time limit, before the loop itself counts as stuck


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is, and how long it may take."""

    command: tuple[str, ...] = ()
    url: str = ""
    env: tuple[tuple[str, str], ...] = ()
    headers_env: tuple[tuple[str, str], ...] = ()  # header, and the variable of the environment that holds its value
    timeout_s: float = 30.0
    start_s: float = 120.0

    @property
    def name(self) -> str:
        return self.url or " ".join(self.command)


class Loop:
    """An asyncio loop in a thread, made when it is first needed, anew in a forked process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner = 0

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        with self._lock:
            if self._loop is None or self._owner != os.getpid():
                self._loop, self._owner = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)


LOOP = Loop()


class Connection:
    """One session with a server: opened by the first use, and again after it was lost."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._lock = threading.Lock()
        self._client: Any = None
        self._ending: asyncio.Event | None = None
        self._task: Future[Any] | None = None
        self._owner = 0

    def list(self) -> list[Any]:
        return list(self._use(lambda client: _all_tools(client), self.server.start_s))

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        limit = self.server.timeout_s
        return self._use(lambda client: client.call_tool(name, dict(arguments), read_timeout_seconds=limit), limit)

    def _use(self, work: Any, limit_s: float) -> Any:
        """Do something with the open session. One whose server is gone is closed: the next use opens another."""
        client = self._opened()
        try:
            return LOOP.start(work(client)).result(limit_s + GRACE_S)
        except TimeoutError:
            self.close()
            raise ValueError(f"the tool's server gave no answer in {limit_s:g} s") from None
        except Exception as error:
            if not _is_answer(error):
                self.close()
            raise

    def _opened(self) -> Any:
        with self._lock:
            if self._owner != os.getpid() or (self._task is not None and self._task.done()):
                self._client = None
            if self._client is None:
                self._open()
            return self._client

    def _open(self) -> None:
        ready: Future[Any] = Future()
        self._task, self._owner = LOOP.start(self._live(ready)), os.getpid()
        try:
            self._client = ready.result(self.server.start_s)
        except TimeoutError:
            self._task.cancel()
            raise ValueError(f"the MCP server {self.server.name} did not start in {self.server.start_s:g} s") from None

    async def _live(self, ready: Future[Any]) -> None:
        """Hold the session open, in one task from its beginning to its end, as the SDK wants it."""
        self._ending = asyncio.Event()
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await _client(self.server, stack))
                ready.set_result(client)
                await self._ending.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(ValueError(f"the MCP server {self.server.name} did not start: {_plainly(error)}"))
            elif not isinstance(error, asyncio.CancelledError):
                logger.warning("the MCP server %s is gone: %s", self.server.name, _plainly(error))

    def close(self) -> None:
        task, ending = self._task, self._ending
        self._task, self._client = None, None
        if task is None or task.done() or self._owner != os.getpid():
            return
        if ending is not None:
            LOOP.start(_set(ending))
        with contextlib.suppress(Exception):
            task.result(GRACE_S)


def _is_answer(error: Exception) -> bool:
    """Whether the server answered, if only with an error."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.code != CONNECTION_CLOSED


async def _set(event: asyncio.Event) -> None:
    event.set()


async def _all_tools(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            return found


async def _client(server: Server, stack: AsyncExitStack) -> Any:
    import mcp
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if not server.url:
        given = mcp.StdioServerParameters(
            command=server.command[0], args=list(server.command[1:]), env=dict(server.env)
        )
        return mcp.Client(given)
    missing = [name for _, name in server.headers_env if name not in os.environ]
    if missing:
        raise ValueError(f"{missing[0]} is not in the environment")
    if not server.headers_env:
        return mcp.Client(server.url)
    headers = {header: os.environ[name] for header, name in server.headers_env}
    http = await stack.enter_async_context(create_mcp_http_client(headers=headers))
    return mcp.Client(streamable_http_client(server.url, http_client=http))


def _plainly(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


class McpTool:
    """One tool of a server."""

    def __init__(self, connection: Connection, schema: Mapping[str, Any], is_own: bool) -> None:
        self.connection, self.schema, self.is_own = connection, schema, is_own
        self.name = str(schema["function"]["name"])

    def call(self, arguments: Mapping[str, Any]) -> str:
        result = self.connection.call(self.name, arguments)
        text = _text(result)
        if result.is_error:
            raise ValueError(text)
        return text

    def close(self) -> None:
        if self.is_own:
            self.connection.close()


def _text(result: Any) -> str:
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


# What is kept of this process's servers

_shared: dict[Server, Connection] = {}
_listed: dict[Server, list[dict[str, Any]]] = {}
_lock, _listing = threading.Lock(), threading.Lock()


def close_all() -> None:
    with _lock:
        connections = list(_shared.values())
        _shared.clear()
    for connection in connections:
        connection.close()


atexit.register(close_all)


def _schemas(server: Server, connection: Connection) -> list[dict[str, Any]]:
    """What a server offers, asked once per process: all prompts of a run tell of the same tools."""
    with _listing:
        if server not in _listed:
            try:
                listed = connection.list()
            except Exception as error:
                raise ConfigError(
                    f"MCP server {server.name}: {_plainly(error)}", "start it, or mend its command"
                ) from error
            _listed[server] = [_schema(tool) for tool in listed]
        return _listed[server]


def _schema(tool: Any) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    return {"type": "function", "function": about}


def tools(
    command: str | Sequence[str] = "",
    url: str = "",
    env: Mapping[str, str] | None = None,
    headers_env: Mapping[str, str] | None = None,
    session: str = "shared",
    only: Sequence[str] = (),
    timeout_s: float = 30.0,
    start_s: float = 120.0,
) -> list[Tool]:
    """`session`: shared by all conversations of a process, or `own`. `only`: the tools that the model is told of.
    `headers_env`: headers of a server at a URL, by the names of the variables that hold them."""
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise MissingExtra("the tool mcp", "mcp", "mcp") from None
    words = tuple(shlex.split(command) if isinstance(command, str) else command)
    if bool(words) == bool(url):
        raise ConfigError("the tool mcp needs either a command or a url", "{mcp: {command: python server.py}}")
    if session not in ("shared", "own"):
        raise ConfigError(f"session of the tool mcp is {session!r}", "write shared or own")
    own = {name: tuple(sorted((given or {}).items())) for name, given in (("env", env), ("headers_env", headers_env))}
    server = Server(words, url, own["env"], own["headers_env"], timeout_s, start_s)
    if session == "own":
        connection = Connection(server)
        schemas = _schemas(server, connection)
        connection.close()  # opened again by the first call: many conversations make none
    else:
        with _lock:
            connection = _shared.setdefault(server, Connection(server))
        schemas = _schemas(server, connection)
    names = [schema["function"]["name"] for schema in schemas]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise ConfigError(f"MCP server {server.name} has no tool {unknown[0]!r}", f"it has {', '.join(names)}")
    chosen = [schema for schema in schemas if not only or schema["function"]["name"] in only]
    return [McpTool(connection, schema, session == "own") for schema in chosen]
