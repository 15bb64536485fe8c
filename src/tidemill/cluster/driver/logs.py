"""One stream of all workers' output: each line with its role and rank; repeated lines are counted."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

LOOK_S = 0.5
QUIET_S = 5.0  # a repeated line is held back this long, and then printed with its count
STREAM = "all.log"
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


class LogStream:
    """Follows the workers' own files in `folder` and writes `all.log` beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, int] = {}
        self._seen: dict[str, tuple[float, int, str]] = {}  # line without its numbers → since, repeats, first by
        self._stop = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._out = (folder / STREAM).open("a", encoding="utf-8")
        self._thread = threading.Thread(target=self._follow, name="logs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._out.close()

    def say(self, text: str) -> None:
        """Write a line of the driver's own."""
        self._write("driver", text)

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.look()
        self.look()
        self._tell_repeats(float("inf"))

    def look(self) -> None:
        for file in sorted(self.folder.glob("*.log")):
            if file.name != STREAM:
                self._take(file)
        self._tell_repeats(time.monotonic())
        self._out.flush()

    def _take(self, file: Path) -> None:
        at = self._read.get(file, 0)
        with file.open("rb") as source:
            source.seek(at)
            whole, newline, _ = source.read().rpartition(b"\n")
        self._read[file] = at + len(whole) + len(newline)
        for line in whole.decode(errors="replace").splitlines():
            if line.strip():
                self._line(file.stem, line)

    def _line(self, who: str, line: str) -> None:
        key = _NUMBERS.sub("#", line)
        if key in self._seen:
            since, count, first = self._seen[key]
            self._seen[key] = since, count + 1, first
            return
        self._seen[key] = time.monotonic(), 0, line
        self._write(who, line)

    def _tell_repeats(self, now: float) -> None:
        for key, (since, count, line) in list(self._seen.items()):
            if now - since > QUIET_S:
                del self._seen[key]
                if count:
                    self._write("all", f"{line}  (and {count} times more)")

    def _write(self, who: str, line: str) -> None:
        role, _, rank = who.rpartition("-")
        name = f"{role} {rank}" if role else who
        self._out.write(f"{time.strftime('%H:%M:%S')} [{name}] {line}\n")
