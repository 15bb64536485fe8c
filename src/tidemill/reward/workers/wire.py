"""JSON messages over a socket between a process and the ones it started: a length, then the bytes."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

HEADER = struct.Struct("=I")


class JsonSocket:
    """One end. The standard library's Connection would do as well, but takes 100 modules along into every process."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    @staticmethod
    def at(handle: int) -> JsonSocket:
        """The end that this process was started with."""
        return JsonSocket(socket.socket(fileno=handle))

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        self.end.sendall(HEADER.pack(len(data)) + data)

    def receive(self, within_s: float | None = None) -> Any:
        """The next message; None when it has not begun to come in time. EOFError when the other end is gone."""
        if within_s is not None and not self._is_readable(within_s):
            return None
        (size,) = HEADER.unpack(self._exactly(HEADER.size))
        return json.loads(self._exactly(size))

    def _is_readable(self, within_s: float) -> bool:
        waiting = select.poll()  # unlike select, not limited to the first 1024 files
        waiting.register(self.end, select.POLLIN)
        deadline = time.monotonic() + within_s
        while (left := deadline - time.monotonic()) > 0:
            if waiting.poll(left * 1000):
                return True
        return bool(waiting.poll(0))

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            data = self.end.recv(size - len(parts))
            if not data:
                raise EOFError
            parts += data
        return bytes(parts)

    def close(self) -> None:
        self.end.close()
