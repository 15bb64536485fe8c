"""The catalog: which warehouse holds which chunk, and which segments nobody needs. Pure, like the ledger."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tidemill.dock.net.messages import Announce, ChunkAt, Copy, Empty
from tidemill.dock.store.segment import SegmentGone

SegmentKey = tuple[int, int, int]  # warehouse, segment, generation

ORDERS_AT_ONCE = 256
REPEAT_ORDER_S = 1.0  # a request to pull that was not fulfilled is repeated after this
NEVER = -float("inf")


@dataclass(slots=True)
class Warehouse:
    hello: Announce
    heard: float
    figures: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class CatalogEntry:
    nbytes: int
    copies: list[Copy]


class Catalog:
    def __init__(self, replicas: int = 0) -> None:
        self.replicas = replicas
        self.warehouses: dict[int, Warehouse] = {}
        self.lost_warehouses: set[int] = set()
        self.next_key = 0
        self.effects: list[tuple[Any, ...]] | None = None
        self._chunks: dict[int, CatalogEntry] = {}
        self._needed: dict[SegmentKey, int] = {}  # chunks alive in a segment
        self._retired: dict[tuple[int, int], int] = {}
        # chunks with too few copies, and when one was last requested: longest ago first
        self._short: OrderedDict[int, float] = OrderedDict()

    def usable(self, copies: Iterable[Copy]) -> list[Copy]:
        """Return copies that may be sealed. Refused if fewer are valid than possible: a segment was recycled before
        the ledger knew its contents, or a warehouse left or joined meanwhile. The writer then writes again."""
        good = [c for c in copies if c.warehouse in self.warehouses and not self._is_gone(c)]
        possible = min(1 + self.replicas, len(self.warehouses))
        if len(good) < max(1, possible):
            raise SegmentGone(f"only {len(good)} of {max(1, possible)} copies are still there", "write it again")
        return good

    def add(self, nbytes: int, copies: list[Copy]) -> int:
        key = self.next_key
        self.next_key += 1
        if self.effects is not None:
            self.effects.append(("chunk", key, nbytes, [list(_plain(c)) for c in copies]))
        self._insert(key, nbytes, copies)
        return key

    def at(self, key: int) -> ChunkAt:
        entry = self._chunks[key]
        return ChunkAt(key, entry.nbytes, tuple(entry.copies))

    def add_copy(self, key: int, copy: Copy) -> bool:
        """Note that a warehouse pulled a chunk. False: nobody needs the chunk any more."""
        entry = self._chunks.get(key)
        if entry is None or self._is_gone(copy):
            return False
        if all(c.warehouse != copy.warehouse for c in entry.copies):
            entry.copies.append(copy)
            self._count(copy, 1)
            if self.effects is not None:
                self.effects.append(("copy", key, list(_plain(copy))))
            self._note_short(key)
        return True

    def free(self, keys: Iterable[int]) -> list[tuple[int, Empty]]:
        """Free chunks that no row needs. Returns (warehouse, notice) for segments that are now empty."""
        notices = []
        for key in keys:
            entry = self._chunks.pop(key, None)
            self._short.pop(key, None)
            for copy in entry.copies if entry else ():
                if self._count(copy, -1) == 0:
                    notices.append((copy.warehouse, Empty(copy.segment, copy.generation)))
        return notices

    def retire(self, warehouse: int, segments: dict[int, int]) -> tuple[int, ...]:
        """Return those of a warehouse's segments that hold nothing needed; nothing can be sealed in them from now
        on."""
        empty = tuple(n for n, generation in segments.items() if not self._needed.get((warehouse, n, generation)))
        for number in empty:
            self._retired[warehouse, number] = segments[number]
        return empty

    def announce(self, hello: Announce, now: float) -> list[int]:
        """Note that a warehouse came (back). Returns chunks that are lost because its segments are gone."""
        self.warehouses[hello.warehouse] = Warehouse(hello, now)
        mine = [(segment, generation) for w, segment, generation in self._needed if w == hello.warehouse]
        # chunks sealed after the announcement was written are newer than it
        gone = {
            (segment, generation)
            for segment, generation in mine
            if segment < hello.next_segment and hello.segments.get(segment, generation + 1) > generation
        }
        if not gone:
            return []
        return self._strip(lambda c: c.warehouse == hello.warehouse and (c.segment, c.generation) in gone)

    def holders(self) -> set[int]:
        """Return warehouses that hold something, whether they have announced themselves or not."""
        return {warehouse for warehouse, _, _ in self._needed}

    def lose(self, warehouse: int) -> list[int]:
        """Remove a warehouse for good. Returns the chunks that have no copy left."""
        self.warehouses.pop(warehouse, None)
        self.lost_warehouses.add(warehouse)
        self._retired = {key: generation for key, generation in self._retired.items() if key[0] != warehouse}
        if self.effects is not None:
            self.effects.append(("lost", warehouse))
        return self._strip(lambda c: c.warehouse == warehouse)

    def orders(self, now: float) -> list[tuple[int, ChunkAt]]:
        """Return (warehouse, chunk) pairs to pull, so that every chunk has enough copies. Some at a time;
        unfulfilled requests are repeated."""
        orders: list[tuple[int, ChunkAt]] = []
        if len(self.warehouses) < 2:
            return orders
        for key in list(islice(self._short, ORDERS_AT_ONCE)):
            if now - self._short[key] < REPEAT_ORDER_S:
                break
            self._short[key] = now
            self._short.move_to_end(key)
            holders = {c.warehouse for c in self._chunks[key].copies}
            others = [w for w in self.warehouses if w not in holders]
            if others:
                orders.append((others[key % len(others)], self.at(key)))
        return orders

    def short_of_copies(self) -> int:
        return len(self._short)

    def keep_only(self, needed: Container[int]) -> None:
        """Drop other chunks after a restart: they were written but never became part of a row."""
        self.free([key for key in self._chunks if key not in needed])

    def dump(self) -> dict[str, Any]:
        chunks = [[key, e.nbytes, [list(_plain(c)) for c in e.copies]] for key, e in self._chunks.items()]
        return {"next": self.next_key, "chunks": chunks, "lost": sorted(self.lost_warehouses)}

    def load(self, record: dict[str, Any]) -> None:
        self.next_key = record["next"]
        self.lost_warehouses = set(record["lost"])
        for key, nbytes, copies in record["chunks"]:
            self._insert(key, nbytes, [Copy(*c) for c in copies])

    def redo(self, effect: tuple[Any, ...]) -> None:
        """Replay one recorded step after a restart."""
        match effect:
            case ("chunk", key, nbytes, copies):
                self.next_key = key + 1
                self._insert(key, nbytes, [Copy(*c) for c in copies])
            case ("copy", key, copy):
                self.add_copy(key, Copy(*copy))
            case ("lost", warehouse):
                self.lose(warehouse)

    def _insert(self, key: int, nbytes: int, copies: list[Copy]) -> None:
        self._chunks[key] = CatalogEntry(nbytes, list(copies))
        for copy in copies:
            self._count(copy, 1)
        self._note_short(key)

    def _strip(self, is_gone: Callable[[Copy], bool]) -> list[int]:
        orphans = []
        for key, entry in self._chunks.items():
            left = [c for c in entry.copies if not is_gone(c)]
            if len(left) == len(entry.copies):
                continue
            for copy in entry.copies:
                if is_gone(copy):
                    self._count(copy, -1)
            entry.copies = left
            self._note_short(key)
            if not left:
                orphans.append(key)
        return orphans

    def _note_short(self, key: int) -> None:
        n = len(self._chunks[key].copies)
        if not 0 < n <= self.replicas:
            self._short.pop(key, None)
        elif key not in self._short:
            self._short[key] = NEVER
            self._short.move_to_end(key, last=False)

    def _count(self, copy: Copy, n: int) -> int:
        key = (copy.warehouse, copy.segment, copy.generation)
        left = self._needed.get(key, 0) + n
        if left:
            self._needed[key] = left
        else:
            self._needed.pop(key, None)
        return left

    def _is_gone(self, copy: Copy) -> bool:
        retired = self._retired.get((copy.warehouse, copy.segment), -1)
        return copy.warehouse in self.lost_warehouses or copy.generation <= retired


def _plain(copy: Copy) -> tuple[int, int, int, int]:
    return copy.warehouse, copy.segment, copy.generation, copy.offset
