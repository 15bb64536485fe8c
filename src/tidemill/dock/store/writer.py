"""Writes chunks into lent segments, one after the other, each to its final place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tidemill.dock.net.messages import Copy, Lent
from tidemill.dock.store.chunk import ALIGN
from tidemill.dock.store.segment import Bytes, Mapped, SegmentGone, Views


@dataclass(slots=True, eq=False)
class OpenSegment:
    lent: Lent
    mapped: Mapped
    body: Bytes
    used: int = 0
    unsealed: int = 0  # chunks reserved and not yet settled
    is_full: bool = False


@dataclass(slots=True)
class Reservation:
    writer: Writer
    segment: OpenSegment
    copy: Copy
    target: Bytes


class Writer:
    """Reserves room for chunks in segments of one warehouse. A segment is given back when it is full and every chunk
    in it is either known to the ledger or given up: else the ledger could learn of bytes that are gone."""

    def __init__(
        self,
        arena: Path,
        warehouse: int,
        views: Views,
        lend: Callable[[int], Lent],
        close: Callable[[int, int], None],
    ) -> None:
        self._arena, self.warehouse, self._views = arena, warehouse, views
        self._lend, self._close = lend, close
        self._lock = threading.Lock()
        self._current: OpenSegment | None = None

    def reserve(self, nbytes: int) -> Reservation:
        with self._lock:
            current = self._current
            if current is None or current.used + nbytes > len(current.body):
                self._retire_current()
                current = self._current = self._open(nbytes)
            offset = current.used
            current.used = -(-(offset + nbytes) // ALIGN) * ALIGN
            current.unsealed += 1
            copy = Copy(self.warehouse, current.lent.segment, current.lent.generation, offset)
            return Reservation(self, current, copy, current.body[offset : offset + nbytes])

    def settle(self, reservation: Reservation) -> None:
        """Mark a chunk as known to the ledger, or given up."""
        with self._lock:
            segment = reservation.segment
            segment.unsealed -= 1
            # a segment without room for a usual chunk is closed at once: its warehouse may need it soon
            if segment is self._current and segment.used > len(segment.body) // 8 * 7:
                self._retire_current()
            elif segment.is_full:
                self._give_back(segment)

    def close(self) -> None:
        with self._lock:
            self._retire_current()

    def _open(self, nbytes: int) -> OpenSegment:
        for _ in range(8):
            lent = self._lend(nbytes)
            try:
                mapped, body = self._views.hold_for_writing(self._arena, lent.segment, lent.generation)
            except SegmentGone:  # we were too slow, and it was taken back
                continue
            return OpenSegment(lent, mapped, body)
        raise SegmentGone("no segment could be had from this node's warehouse", "see the warehouse's log")

    def _retire_current(self) -> None:
        if self._current is not None:
            segment, self._current = self._current, None
            segment.is_full = True
            self._give_back(segment)

    def _give_back(self, segment: OpenSegment) -> None:
        if segment.unsealed == 0:
            self._views.release(segment.mapped)
            self._close(segment.lent.segment, segment.lent.generation)
