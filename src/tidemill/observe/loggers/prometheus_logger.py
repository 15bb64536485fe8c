"""A Prometheus endpoint of the driver: the newest value of every metric, at http://HOST:PORT/metrics."""

from __future__ import annotations

import math
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tidemill.observe.loggers.api import RunInfo

MOST_CONNECTIONS = 32  # a scrape needs one for a moment; anybody who reaches the port can hold some
SILENCE_S = 10.0


class Bounded(ThreadingHTTPServer):
    """Has few connections: beyond them the oldest is closed, so that nobody takes the run's files and threads."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, None] = {}  # in order of arrival
        self._mutex = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        with self._mutex:
            self._open[request] = None
            if len(self._open) > MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._mutex:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is not told on the terminal."""


class Prometheus:
    """Needs no package: its text format is a few lines."""

    def __init__(self, run: RunInfo) -> None:
        self._label = run.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._latest: dict[str, float] = {}
        self._mutex = threading.Lock()
        self._server = Bounded((run.host, run.port), self._handler())
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._mutex:
            self._latest |= {"step": float(step), **metrics}

    def event(self, kind: str, text: str) -> None:
        """A scrape sees numbers only."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def text(self) -> str:
        with self._mutex:
            latest = dict(self._latest)
        lines = []
        for name, value in latest.items():
            metric = "tidemill_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            number = repr(float(value)) if math.isfinite(value) else "NaN"
            lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{self._label}"}} {number}']
        return "\n".join(lines) + "\n"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        own = self

        class Handler(BaseHTTPRequestHandler):
            timeout = SILENCE_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body = own.text().encode()
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Scrapes are not told on the terminal."""

        return Handler


open_logger = Prometheus
