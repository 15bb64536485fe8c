"""Chunks: which stored pieces are still needed, and how much of its credit each partition uses. A chunk is what one put
or one commit wrote. It is freed as a whole, when the last of its rows no longer needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class CreditedChunk:
    columns: tuple[str, ...]
    nbytes: int
    refs: int  # number of rows that still need it
    tag: str


@dataclass(slots=True)
class HeldChunk:
    rows: int = 0
    nbytes: int = 0


class Chunks:
    def __init__(self, max_rows: int | None = None, max_bytes: int | None = None) -> None:
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self.freed: list[int] = []  # drained by the caller, which frees the bytes
        self.nbytes = 0
        self.written = 0  # bytes so far
        self._chunks: dict[int, CreditedChunk] = {}
        self._held: dict[str, HeldChunk] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._chunks

    def __getitem__(self, key: int) -> CreditedChunk:
        return self._chunks[key]

    def items(self) -> Iterable[tuple[int, CreditedChunk]]:
        return self._chunks.items()

    def has_room(self, tag: str, rows: int, nbytes: int) -> bool:
        """Say whether a put fits. An empty partition accepts any put: one larger than the limit must pass, too."""
        held = self._held.get(tag)
        if held is None or held.rows == 0:
            return True
        return (self.max_rows is None or held.rows + rows <= self.max_rows) and (
            self.max_bytes is None or held.nbytes + nbytes <= self.max_bytes
        )

    def add(self, key: int, chunk: CreditedChunk) -> None:
        self.written += chunk.nbytes
        if chunk.refs == 0:
            self.freed.append(key)
            return
        self._chunks[key] = chunk
        self.nbytes += chunk.nbytes
        self._held.setdefault(chunk.tag, HeldChunk()).nbytes += chunk.nbytes

    def unref(self, keys: list[int]) -> None:
        """Release chunks that rows no longer need, one entry per row."""
        for key, n in Counter(keys).items() if len(keys) > 1 else ((key, 1) for key in keys):
            self.release(key, n)

    def release(self, key: int, n: int) -> None:
        """`n` rows no longer need this chunk."""
        chunk = self._chunks[key]
        chunk.refs -= n
        if chunk.refs == 0:
            del self._chunks[key]
            self.freed.append(key)
            self.nbytes -= chunk.nbytes
            held = self._held[chunk.tag]
            held.nbytes -= chunk.nbytes
            if not held.rows and not held.nbytes:
                del self._held[chunk.tag]

    def count_rows(self, tag: str, n: int) -> None:
        held = self._held.setdefault(tag, HeldChunk())
        held.rows += n
        if not held.rows and not held.nbytes:
            del self._held[tag]

    def rows_of(self, tag: str) -> int:
        held = self._held.get(tag)
        return held.rows if held is not None else 0

    def held(self) -> dict[str, HeldChunk]:
        return self._held
