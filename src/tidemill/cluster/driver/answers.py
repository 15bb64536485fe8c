"""The answers of many workers that were asked the same: collected as they come, each looked at once."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Answers:
    """Collects the answers of many members. Each is looked at once, when it comes: with thousands of members, looking
    at all of them whenever one has answered would cost the square of their number."""

    def __init__(self, futures: dict[str, Future[Any]], events: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        self.futures, self._events = futures, events
        self._came: deque[Future[Any]] = deque()  # filled by any thread
        distinct = {id(f): f for f in futures.values()}  # one future may answer for many
        self._left = len(distinct)
        self._has_failed = False
        for future in distinct.values():
            future.add_done_callback(self._comes)

    def _comes(self, future: Future[Any]) -> None:
        self._came.append(future)
        self._events.put(None)

    @property
    def are_in(self) -> bool:
        """Whether all have answered, or one has failed."""
        while self._came:
            future = self._came.popleft()
            self._left -= 1
            self._has_failed = self._has_failed or bool(future.exception() or future.result().failure)
        return not self._left or self._has_failed

    def missing(self) -> list[str]:
        return [name for name, f in self.futures.items() if not f.done()]

    def found(self) -> list[tuple[str, Future[Any]]]:
        """Those that are in, lost workers' first."""
        if not self._has_failed:
            return list(self.futures.items())
        done = [(name, f) for name, f in self.futures.items() if f.done()]
        return sorted(done, key=lambda pair: pair[1].exception() is None)
