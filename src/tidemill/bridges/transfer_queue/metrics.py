"""The queue's figures over HTTP, in Prometheus' text format."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from tidemill.dock.api import DockState
from tidemill.dock.view import prometheus


class MetricsServer:
    def __init__(self, figures: Callable[[], dict[str, Any]], host: str, port: int = 0) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = _text(figures()).encode()
                self.send_response(200 if self.path == "/metrics" else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, port), Handler)
        self.endpoint = f"{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _text(figures: dict[str, Any]) -> str:
    known = {name: figures[name] for name in DockState.__dataclass_fields__ if name in figures}
    lines = [prometheus(msgspec.convert(known, DockState)).rstrip()]
    for name, about in (
        ("rows", "Rows of the partition."),
        ("consumed", "Rows that a task has had."),
    ):
        lines += [f"# HELP tidemill_queue_{name} {about}", f"# TYPE tidemill_queue_{name} gauge"]
        for partition, counts in figures["keyed"].items():
            for label, value in _labelled(partition, counts[name]):
                lines.append(f"tidemill_queue_{name}{{{label}}} {value}")
    return "\n".join(lines) + "\n"


def _labelled(partition: str, counts: int | dict[str, int]) -> list[tuple[str, int]]:
    label = f'partition="{_escaped(partition)}"'
    if isinstance(counts, int):
        return [(label, counts)]
    return [(f'{label},task="{_escaped(task)}"', n) for task, n in counts.items()]


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
