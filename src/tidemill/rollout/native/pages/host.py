"""Which pages of the cache lie in host memory (host-side bookkeeping only), and what is to be copied where before the
next pass.

A row of host memory holds one page of every layer. A page that a group shares has one row, which each member's copy
holds once; when the first of them comes back, the others find its page again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tidemill.rollout.native.pages.cache import PagePool
from tidemill.rollout.native.pages.states import Hand


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The cache of a sample that has no slot."""

    rows: list[int]  # of its pages, in their order
    state: list[int]  # of its states


@dataclass(frozen=True, slots=True)
class PageCopy:
    source: list[int]
    target: list[int]


@dataclass(frozen=True, slots=True)
class ToHost:
    pages: list[int]
    rows: list[int]
    state: list[int]  # rows
    slot: int = -1  # whose states are meant; -1: those in `hand`
    hand: Hand = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FromHost:
    rows: list[int]
    pages: list[int]
    state: list[int]
    hand: Hand  # where the states come to be


Move = PageCopy | ToHost | FromHost


class HostPool:
    """Rows, lowest first. There are none until `open` says how many: only the first pass tells what a page takes."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.rows = self.state_rows = 0
        self.holders = np.zeros(0, np.int32)
        self.free: list[int] = []
        self._row_of: dict[tuple[int, int], int] = {}  # by page and tenancy, of shared pages
        self._home: dict[int, tuple[int, int]] = {}
        self.pages_out = self.pages_in = 0  # copied, ever

    def open(self, rows: int, state_rows: int) -> None:
        """`state_rows`: that one sequence's states take."""
        self.rows, self.state_rows = rows, state_rows
        self.holders = np.zeros(rows, np.int32)
        self.free = list(range(rows))

    @property
    def used(self) -> int:
        return self.rows - len(self.free)

    def put(self, pages: Sequence[int], shared: int) -> tuple[HostCopy, list[tuple[int, int]]] | None:
        """Rows for these pages, of which the first `shared` may be others' too, and for their states; and which pages
        are to be copied to which rows. None where there is no room."""
        known = [self._row_of.get(self.pool.tenant(page)) for page in pages[:shared]]
        missing = len(pages) - sum(row is not None for row in known)
        if missing + self.state_rows > len(self.free):
            return None
        rows, copied = [], []
        for place, page in enumerate(pages):
            row = known[place] if place < shared else None
            if row is None:
                row = self._take()
                copied.append((page, row))
                if place < shared:
                    self._lives_at(row, page)
            else:
                self.holders[row] += 1
            rows.append(row)
        self.pages_out += len(copied)
        return HostCopy(rows, [self._take() for _ in range(self.state_rows)]), copied

    def held_still(self, copy: HostCopy) -> int:
        """How many of its pages others hold on the device."""
        return sum(self.pool.holders[page] > 0 for page in self._live(copy.rows) if page is not None)

    def bring_back(self, copy: HostCopy, shared: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Pages for all its rows, and which rows are to be copied to which pages; the rows are free then. Ask the pool
        for room first."""
        found = list(self._live(copy.rows))
        for page in found:
            if page is not None:
                self.pool.hold(page)
        pages, copied = [], []
        for place, (row, page) in enumerate(zip(copy.rows, found)):
            if page is None:
                page = self.pool.take()
                copied.append((row, page))
                if place < shared:
                    self._lives_at(row, page)
            pages.append(page)
        self.pages_in += len(copied)
        self.drop(copy)
        return pages, copied

    def drop(self, copy: HostCopy) -> None:
        for row in (*copy.rows, *copy.state):
            self.holders[row] -= 1
            if not self.holders[row]:
                self._row_of.pop(self._home.pop(row, (-1, -1)), None)
                heapq.heappush(self.free, row)

    def _take(self) -> int:
        row = heapq.heappop(self.free)
        self.holders[row] = 1
        return row

    def _lives_at(self, row: int, page: int) -> None:
        self._row_of.pop(self._home.get(row, (-1, -1)), None)
        self._home[row] = self.pool.tenant(page)
        self._row_of[self._home[row]] = row

    def _live(self, rows: Sequence[int]) -> Iterator[int | None]:
        """Of each row the page that has the same content, where there still is one."""
        for row in rows:
            page, tenancy = self._home.get(row, (-1, -1))
            yield page if page >= 0 and self.pool.is_kept(page, tenancy) else None
