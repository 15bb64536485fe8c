"""Ids that have left the dock, so that a producer that puts again after a restart changes nothing. One bit per id, in
pages of 64. Adjacent full pages are one range: ids that count upwards, as producers make them, cost nothing in the long
run. Scattered ids cost about a hundred bytes each, for ever."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

FULL = (1 << 64) - 1


class EndedIds:
    def __init__(self) -> None:
        self._pages: dict[int, int] = {}  # pages that are not full
        self._starts: list[int] = []  # ranges of full pages, ascending and apart: start, and the page after the last
        self._ends: list[int] = []

    def add(self, ids: Ints) -> None:
        if len(ids) < 16:
            for i in ids.tolist():
                self._set(i >> 6, 1 << (i & 63))
            return
        ids = np.sort(ids)
        starts = np.flatnonzero(np.diff(ids >> 6, prepend=ids[0] - 64 >> 6))
        bits = np.bitwise_or.reduceat(np.uint64(1) << (ids & 63).astype(np.uint64), starts)
        for page, mask in zip((ids[starts] >> 6).tolist(), bits.tolist()):
            self._set(page, mask)

    def __contains__(self, i: int) -> bool:
        mask = self._pages.get(i >> 6)
        return bool(mask >> (i & 63) & 1) if mask is not None else self._is_full(i >> 6)

    @property
    def pieces(self) -> int:
        """Return how many pages and ranges are kept."""
        return len(self._pages) + len(self._starts)

    def dump(self) -> dict[str, npt.NDArray[np.generic]]:
        n = len(self._pages)
        return {
            "page": np.fromiter(self._pages.keys(), np.int64, n),
            "bits": np.fromiter(self._pages.values(), np.uint64, n),
            "start": np.array(self._starts, np.int64),
            "end": np.array(self._ends, np.int64),
        }

    def load(self, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        self._pages, self._starts, self._ends = {}, [], []
        if "start" in arrays:
            self._starts, self._ends = arrays["start"].tolist(), arrays["end"].tolist()
        for page, mask in zip(arrays["page"].tolist(), arrays["bits"].tolist()):
            self._set(page, mask)

    def _set(self, page: int, mask: int) -> None:
        before = self._pages.get(page, 0)
        if not before and self._is_full(page):
            return
        mask |= before
        if mask != FULL:
            self._pages[page] = mask
            return
        self._pages.pop(page, None)
        self._join(page)

    def _is_full(self, page: int) -> bool:
        i = bisect_right(self._starts, page)
        return i > 0 and page < self._ends[i - 1]

    def _join(self, page: int) -> None:
        """Merge a full page into the range before it, after it, or both, or make a range of its own."""
        i = bisect_right(self._starts, page)
        follows = i > 0 and self._ends[i - 1] == page
        precedes = i < len(self._starts) and self._starts[i] == page + 1
        if follows and precedes:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif follows:
            self._ends[i - 1] = page + 1
        elif precedes:
            self._starts[i] = page
        else:
            self._starts.insert(i, page)
            self._ends.insert(i, page + 1)
