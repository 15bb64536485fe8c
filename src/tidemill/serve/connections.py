"""A server's connections: how many there may be, how long one may wait before it asks, and whose processes may ask.

Whoever reaches the port can open connections and say nothing. They hold no place that somebody needs: the oldest that
ask for nothing make room.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
from typing import Any, Literal

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemill.serve.peer import is_foreign

MOST_CONNECTIONS = 4096
BACKLOG = 2048
OWN_FILES = 256  # that this process may need beside its connections
MOST_HEAD = 64 << 10  # bytes of a request's line and headers
HEADERS_S = 10.0  # for them to come
SHARE = 64  # one of so many places is made free at once, so that a flood costs little for each of its connections


def config(app: Any, most_connections: int, own_user_only: bool, lifespan: Literal["on", "off"]) -> uvicorn.Config:
    """How uvicorn serves an app of ours to whoever reaches its port."""
    most = min(most_connections, raise_file_limit(most_connections + OWN_FILES) - OWN_FILES)
    return uvicorn.Config(
        app,
        http=protocol(max(most, 1), own_user_only),
        log_level="warning",
        access_log=False,
        lifespan=lifespan,
        limit_concurrency=max(most, 1) + 1,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=3,
        backlog=BACKLOG,
        ws="none",
    )


def raise_file_limit(wanted: int) -> int:
    """Allow a file for each connection, as far as the system lets us. Return how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


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

    @property
    def is_answered(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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


def protocol(most: int, own_user_only: bool = False) -> type[asyncio.Protocol]:
    """What uvicorn makes of each connection. `own_user_only`: processes of other users are sent away."""
    here: dict[Guarded, None] = {}  # in order of arrival

    class Connection(Guarded):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if own_user_only and is_foreign(transport.get_extra_info("peername")[:2], self.server):  # type: ignore[arg-type]
                self.app = _send_away
            here[self] = None
            if len(here) > most:
                self._make_room()

        def connection_lost(self, exc: Exception | None) -> None:
            here.pop(self, None)
            super().connection_lost(exc)

        def _make_room(self) -> None:
            idle = [one for one in here if not one.is_answered and one is not self]
            for one in idle[: max(1, most // SHARE)]:
                here.pop(one, None)
                one.transport.abort()

    return Connection


async def _send_away(scope: Any, receive: Any, send: Any) -> None:
    """What processes of other users are answered."""
    message = f"without a key only processes of this server's own user ({os.geteuid()}) are answered"
    body = json.dumps({"error": {"message": message, "type": "permission_error", "param": None, "code": None}})
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})
