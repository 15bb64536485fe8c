"""A server's socket and its thread: on the loopback address unless told otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
import threading
from collections.abc import Callable, Sequence

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemill.errors import ConfigError
from tidemill.serve.app import App, application
from tidemill.serve.link import EngineLink

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")  # as a request's Host has them
MOST_HEAD = 64 << 10  # bytes of a request's line and headers
HEADERS_S = 10.0  # for them to come
MOST_CONNECTIONS = 4096
BACKLOG = 2048
START_S = 30.0
# For how long one thread may keep Python's lock while another wants it. With the usual 5 ms the engine waits several
# times a step for the server's thread: at 256 streaming clients that takes some 5 % of its tokens per second.
SWITCH_S = 0.0005


def listen(host: str, port: int) -> socket.socket:
    """Listen at a port; 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror}", "name another --host or --port"
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer:
    """uvicorn around the app, in this thread or in one of its own."""

    def __init__(
        self, app: App, links: Sequence[EngineLink], listener: socket.socket, most_connections: int = MOST_CONNECTIONS
    ) -> None:
        raise_file_limit(most_connections + 256)
        sys.setswitchinterval(SWITCH_S)
        self.links, self.listener, self.address = links, listener, address_of(listener)
        config = uvicorn.Config(
            application(app),
            log_level="warning",
            access_log=False,
            lifespan="off",
            limit_concurrency=most_connections,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=3,
            backlog=BACKLOG,
            http=Guarded,
            ws="none",
        )
        self._server = _Attached(config, links)
        self._thread: threading.Thread | None = None

    def run(self, told: Callable[[], None] = lambda: None) -> None:
        """Serve until Ctrl-C."""
        self._server.on_start = told
        self._server.run(sockets=[self.listener])

    def start(self) -> None:
        """Serve in a thread."""
        begun = threading.Event()
        self._server.on_start = begun.set
        self._thread = threading.Thread(target=self._serve, name="gateway", daemon=True)
        self._thread.start()
        if not begun.wait(START_S):
            raise ConfigError(f"the endpoint at {self.address} did not start within {START_S:g} s")

    def _serve(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._server.serve([self.listener]))

    def end(self, timeout_s: float = 5.0) -> None:
        self._server.should_exit = self._server.force_exit = True
        if self._thread is not None:
            self._thread.join(timeout_s)
        self.listener.close()


class Guarded(HttpToolsProtocol):
    """uvicorn's protocol, which by itself waits for a request's head without end, however long it grows."""

    _head = 0  # bytes that have come of it
    _in_head = True
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += len(data)
            if self._head > MOST_HEAD + len(data):  # more than one part: what came at once may hold a body too
                self.transport.close()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_head = True
        self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head = False, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEADERS_S, self._give_up)

    def _give_up(self) -> None:
        self._waiting = None
        self.transport.close()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Attached(uvicorn.Server):
    """Tells the links of the loop once there is one."""

    def __init__(self, config: uvicorn.Config, links: Sequence[EngineLink]) -> None:
        super().__init__(config)
        self.links = links
        self.on_start: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for link in self.links:
            link.attach(asyncio.get_running_loop())
        await super().startup(sockets=sockets)
        self.on_start()


def raise_file_limit(wanted: int) -> None:
    """Allow a file for each connection, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < min(wanted, hard):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted if hard == -1 else min(wanted, hard)), hard))
