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
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from tidemill.serve.peer import is_foreign

MOST_CONNECTIONS = 4096
BACKLOG = 2048
OWN_FILES = 256  # that this process may need beside its connections
HEAD_S = 10.0  # from opening a connection to the end of its first request's head
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


def protocol(most: int, own_user_only: bool = False) -> type[asyncio.Protocol]:
    """What uvicorn makes of each connection. `own_user_only`: processes of other users are sent away."""
    here: dict[asyncio.Protocol, None] = {}  # in order of arrival

    class Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if own_user_only and is_foreign(transport.get_extra_info("peername")[:2], self.server):
                self.app = _send_away
            here[self] = None
            if len(here) > most:
                self._make_room()
            self.loop.call_later(HEAD_S, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            here.pop(self, None)
            super().connection_lost(exc)

        @property
        def asks(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _give_up(self) -> None:
            if self.cycle is None:
                self.transport.abort()

        def _make_room(self) -> None:
            idle = [one for one in here if not one.asks and one is not self]  # type: ignore[attr-defined]
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
