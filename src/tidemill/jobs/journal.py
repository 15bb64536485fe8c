"""The queue's memory: one line of JSON per event, appended and synced. A line that a crash cut short never happened."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidemill.errors import ConfigError

Event = dict[str, Any]


class Journal:
    """Several processes may append; each sees the others' events when it reads on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_bytes = 0
        refuse_foreign(path)

    def read(self) -> list[Event]:
        """Return the whole lines written since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def append(self, event: Mapping[str, Any]) -> None:
        with self._locked() as handle:
            _write(handle, event)

    def add(self, make: Callable[[int], Mapping[str, Any]]) -> int:
        """Append an event that carries the next free number; nobody else can take it."""
        with self._locked() as handle:
            number = self.path.read_bytes().count(b'"event": "add"') + 1
            _write(handle, make(number))
        return number

    @contextmanager
    def _locked(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            _cut_torn_line(handle)
            yield handle
        finally:
            os.close(handle)


def refuse_foreign(path: Path) -> None:
    """The queue says what is run as this user, so another user may not have written it."""
    for one in (path.parent, path):
        if not one.exists():
            continue
        seen = one.stat()
        if seen.st_uid not in (os.geteuid(), 0) or seen.st_mode & 0o002:
            raise ConfigError(
                f"user {seen.st_uid} owns {one}, or anybody may write there: what it says would run as you",
                f"use a folder of your own, or `chown` this one and `chmod o-w {one}`",
            )


def _write(handle: int, event: Mapping[str, Any]) -> None:
    os.write(handle, json.dumps(event).encode() + b"\n")
    os.fsync(handle)


def _cut_torn_line(handle: int) -> None:
    """Remove what a writer that was killed left behind its last whole line."""
    size = os.fstat(handle).st_size
    if not size or os.pread(handle, 1, size - 1) == b"\n":
        return
    data = os.pread(handle, size, 0)
    os.ftruncate(handle, data.rfind(b"\n") + 1)
