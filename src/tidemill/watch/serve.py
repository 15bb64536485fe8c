"""Serving the page: address, token, and where it is told."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tidemill.errors import ConfigError
from tidemill.watch.runs import Runs

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_CONNECTIONS = 256


def serve(
    where: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8640,
    token: str | None = None,
    may_control: bool = False,
    told: Callable[[str], None] = print,
) -> None:
    """Serve until Ctrl-C. `token`: None makes one, "" wants none, which only loopback allows."""
    try:
        import uvicorn

        from tidemill.serve.connections import config
        from tidemill.watch import guard, server
    except ImportError as missing:
        remedy = "pip install 'tidemill[watch]'"
        raise ConfigError(f"the page needs {missing.name}, which is not installed", remedy) from missing
    if token == "" and host not in LOOPBACK:
        raise ConfigError(f"--no-token on {host} would show the runs to everybody", "leave --no-token out")
    if not where.is_dir():
        raise ConfigError(f"there is no folder {where}", "`tidemill train RECIPE` makes runs/NAME")
    token = secrets.token_urlsafe(24) if token is None else token
    hosts = guard.LOOPBACK if host in LOOPBACK else ()
    ending = threading.Event()
    app = server.application(Runs.at(where), token=token, may_control=may_control, hosts=hosts, ending=ending)
    listener = _listener(host, port)
    address = f"http://{host if ':' not in host else f'[{host}]'}:{listener.getsockname()[1]}/"
    told(f"{address}{f'?token={token}' if token else ''}")

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            ending.set()
            super().handle_exit(sig, frame)

    Server(config(app, MOST_CONNECTIONS, own_user_only=not token, lifespan="on")).run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    """The port that was asked for, or the next free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (*range(port, port + 20), 0) if port else (0,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(128)  # before the address is told: who opens it at once waits and is not refused
        except OSError:
            listener.close()
            continue
        return listener
    raise ConfigError(f"no port of {host} is free for the page", "name another --host or --port")
