"""The ledger's table: rows as numpy columns with recycled slots."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.dock.net.compact import span

Ints = npt.NDArray[np.int64]

FREE, LIVE, ENDING = 0, 1, 2  # ENDING: dropped while another stage still holds a lease on the row

_FIELDS: dict[str, type] = {
    "id": np.int64,
    "group": np.int64,
    "version": np.int32,
    "length": np.int32,
    "score": np.float32,  # the watched column's value
    "tag": np.int32,
    "state": np.int8,
    "serial": np.int64,  # order of arrival
    "born": np.float64,
    "written": np.uint64,  # one bit per column that stages read
    "source": np.uint64,  # bits of the columns that were put
    "pending": np.uint64,  # one bit per stage that has not consumed the row
    "leased": np.uint64,  # one bit per stage that holds a lease on it
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table: their slots, and the same as a slice where they lie together, which numpy reads far faster."""

    slots: Ints
    where: slice | Ints

    @staticmethod
    def at(slots: Ints) -> Rows:
        return Rows(slots, span(slots) if len(slots) else slots)


def same(array: npt.NDArray[Any]) -> int | None:
    """Return the value that all entries have; None where they differ, or where there are none. Rows that came together
    mostly go on together: then one number is worked out instead of an array."""
    raw, size = array.tobytes(), array.itemsize
    return int(array[0]) if raw and raw[size:] == raw[:-size] else None


class TagCount(dict[int, int]):
    """Count the rows of each tag; tags without rows are not kept."""

    def add(self, tags: npt.NDArray[np.int32], sign: int) -> None:
        raw = tags.tobytes()  # in the usual case bytes are compared, without running numpy
        if raw[4:] == raw[:-4]:
            if raw:
                self.change(int.from_bytes(raw[:4], sys.byteorder), sign * len(tags))
            return
        for tag, n in Counter(tags.tolist()).items():
            self.change(tag, sign * n)

    def change(self, tag: int, n: int) -> None:
        now = self.get(tag, 0) + n
        if now:
            self[tag] = now
        else:
            self.pop(tag, None)

    def of(self, tag: int | None) -> int:
        """Return the number of rows of one tag; None: of all."""
        return sum(self.values()) if tag is None else self.get(tag, 0)


class RowTable:
    """A struct of arrays. `chunk[p]` and `place[p]`: where part p of each row is; part 0 was put, part s+1 committed
    by stage s; chunk -1: none."""

    def __init__(self, parts: int, capacity: int = 1024) -> None:
        for name, dtype in _FIELDS.items():
            setattr(self, name, np.zeros(capacity, dtype))
        self.chunk = np.full((parts, capacity), -1, np.int64)
        self.place = np.zeros((parts, capacity), np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    id: Ints
    group: Ints
    version: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    score: npt.NDArray[np.float32]
    tag: npt.NDArray[np.int32]
    state: npt.NDArray[np.int8]
    serial: Ints
    born: npt.NDArray[np.float64]
    written: npt.NDArray[np.uint64]
    source: npt.NDArray[np.uint64]
    pending: npt.NDArray[np.uint64]
    leased: npt.NDArray[np.uint64]

    def allocate(self, n: int) -> Ints:
        while len(self._free) < n:
            self._double()
        slots = self._free[: -n - 1 : -1]
        del self._free[-n:]
        return np.array(slots, np.int64)

    def release(self, slots: Ints) -> None:
        self.state[slots] = FREE
        self._free.extend(reversed(slots.tolist()))

    def live(self) -> Ints:
        return np.flatnonzero(self.state != FREE)

    def _double(self) -> None:
        old = len(self.id)
        for name in _FIELDS:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(old, array.dtype)]))
        self.chunk = np.concatenate([self.chunk, np.full_like(self.chunk, -1)], axis=1)
        self.place = np.concatenate([self.place, np.zeros_like(self.place)], axis=1)
        self._free = [*range(2 * old - 1, old - 1, -1), *self._free]
