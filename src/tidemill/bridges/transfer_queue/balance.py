"""Splits lengths over ranks so that each gets as many and about as much: Karmarkar and Karp's largest differencing, for
parts of equal size (1982; many parts at once)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(order=True, slots=True)
class Part:
    """One rank's items. Parts are compared by their sum, then by their number of items, then by the items."""

    total: int
    count: int
    items: list[tuple[int, int]]  # (which, length)

    def joined(self, other: Part) -> Part:
        return Part(self.total + other.total, self.count + other.count, self.items + other.items)


class Split:
    """A split of some items, its heaviest part first. The most uneven split comes out of a heap first."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = sorted(parts, reverse=True)
        self.spread = self.parts[0].total - self.parts[-1].total

    def joined(self, other: Split) -> Split:
        """Lay the heaviest part of one on the lightest of the other."""
        return Split([mine.joined(theirs) for mine, theirs in zip(self.parts, reversed(other.parts))])

    def __lt__(self, other: Split) -> bool:
        return (self.spread, self.parts[0]) > (other.spread, other.parts[0])


def balanced(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return each rank's items, ascending. There must be a multiple of `ranks`."""
    assert len(lengths) % ranks == 0, f"{len(lengths)} items cannot be given to {ranks} ranks evenly"
    items = [(which, length) for length, which in sorted((length, which) for which, length in enumerate(lengths))]
    heap: list[Split] = []
    for at in range(0, len(items), ranks):
        heapq.heappush(heap, Split([Part(length, 1, [(which, length)]) for which, length in items[at : at + ranks]]))
    while len(heap) > 1:
        first = heapq.heappop(heap)
        heapq.heappush(heap, first.joined(heapq.heappop(heap)))
    return [sorted(which for which, _ in part.items) for part in heap[0].parts]
