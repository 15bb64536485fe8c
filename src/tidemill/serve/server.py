"""A server's socket and its thread: on the loopback address unless told otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Sequence

import uvicorn

from tidemill.errors import ConfigError
from tidemill.serve.app import App, application
from tidemill.serve.connections import BACKLOG, MOST_CONNECTIONS, config
from tidemill.serve.link import EngineLink

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")  # as a request's Host has them
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
        self,
        app: App,
        links: Sequence[EngineLink],
        listener: socket.socket,
        most_connections: int = MOST_CONNECTIONS,
        own_user_only: bool = False,
    ) -> None:
        sys.setswitchinterval(SWITCH_S)
        self.links, self.listener, self.address = links, listener, address_of(listener)
        made = config(application(app), most_connections, own_user_only, lifespan="off")
        self._server = _Attached(made, links)
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
