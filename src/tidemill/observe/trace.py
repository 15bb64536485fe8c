"""Where a step's time goes: seconds by stage, and the share in which no stage worked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """`with watch("rollout"): …`, from any thread. Stages may overlap; name work, not the loop around it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._open: dict[int, tuple[str, float]] = {}  # running timers: name and start
        self._next = 0
        self._seconds: dict[str, float] = {}
        self._busy = 0.0  # time in which at least one stage worked
        self._busy_since: float | None = None
        self._lap_start = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        token = self._begin(name)
        try:
            yield
        finally:
            self._end(token)

    def add(self, name: str, seconds: float) -> None:
        """Time measured elsewhere, by a worker; it does not count against idleness here."""
        with self._mutex:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """`seconds/NAME` of each stage, `seconds/step` and `idle_share` since the last lap. Running timers go on."""
        with self._mutex:
            now = self._clock()
            for token, (name, start) in self._open.items():
                self._credit(name, now - start)
                self._open[token] = (name, now)
            if self._busy_since is not None:
                self._busy += now - self._busy_since
                self._busy_since = now
            whole = now - self._lap_start
            found = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
            found["seconds/step"] = whole
            found["idle_share"] = min(1.0, max(0.0, 1.0 - self._busy / whole)) if whole > 0 else 0.0
            self._seconds, self._busy, self._lap_start = {}, 0.0, now
            return found

    def _begin(self, name: str) -> int:
        with self._mutex:
            now = self._clock()
            if not self._open:
                self._busy_since = now
            self._next += 1
            self._open[self._next] = (name, now)
            return self._next

    def _end(self, token: int) -> None:
        with self._mutex:
            now = self._clock()
            name, start = self._open.pop(token)
            self._credit(name, now - start)
            if not self._open and self._busy_since is not None:
                self._busy += now - self._busy_since
                self._busy_since = None

    def _credit(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
