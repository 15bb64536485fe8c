"""Spans of a simulation, kept in memory up to a number, and each worker's busy seconds, which are always counted."""

from __future__ import annotations

from tidemill.observe.timeline import Span

MOST = 200_000  # spans kept of a simulation
GAP_S = 0.02  # between two spans of one stage that are kept as one


class Timeline:
    def __init__(self, most: int = MOST) -> None:
        self.spans: list[Span] = []
        self.most = most
        self.busy: dict[str, float] = {}  # seconds by worker
        self._last: dict[str, Span] = {}

    def span(self, worker: str, what: str, start: float, end: float) -> None:
        if end <= start:
            return
        self.busy[worker] = self.busy.get(worker, 0.0) + end - start
        last = self._last.get(worker)
        if last is not None and last.what == what and start - last.end < GAP_S:
            last.end = end
        elif len(self.spans) < self.most:
            made = self._last[worker] = Span(worker, what, start, end)
            self.spans.append(made)
