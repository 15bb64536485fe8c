"""When a worker did what: begin and end of each piece of work, for a picture of a step. Pieces of one kind that follow
closely are one, so that a step of a thousand decoding steps is a few numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

GAP_S = 0.005  # pieces of one kind that are closer are one
MOST = 64  # pieces of a worker that a step keeps: with more, those that are further apart are one too

Piece = tuple[str, float, float]  # what was done; begin and end in seconds since the epoch


class Timeline:
    """Of one worker. `now` of what is added counts as time.perf_counter does."""

    def __init__(self) -> None:
        self._epoch = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._pieces: dict[str, list[tuple[float, float]]] = {}
        self._gap_s, self._count = GAP_S, 0

    def add(self, what: str, began: float, ended: float) -> None:
        with self._lock:
            own = self._pieces.setdefault(what, [])
            if own and began - own[-1][1] <= self._gap_s:
                own[-1] = (own[-1][0], max(ended, own[-1][1]))
                return
            own.append((began, ended))
            self._count += 1
            while self._count > MOST and self._count > len(self._pieces):
                self._gap_s *= 2
                self._pieces = {name: merged(pieces, self._gap_s) for name, pieces in self._pieces.items()}
                self._count = sum(map(len, self._pieces.values()))

    def drain(self) -> list[Piece]:
        """Return what was added since the last call, in the order of its beginning."""
        with self._lock:
            pieces = self._pieces
            self._clear()
        found = [(what, begin + self._epoch, end + self._epoch) for what, own in pieces.items() for begin, end in own]
        return sorted(found, key=lambda piece: piece[1])


def merged(pieces: Sequence[tuple[float, float]], gap_s: float) -> list[tuple[float, float]]:
    """Join neighbours that are no further apart than `gap_s`."""
    found: list[tuple[float, float]] = []
    for begin, end in pieces:
        if found and begin - found[-1][1] <= gap_s:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
