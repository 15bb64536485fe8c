"""Which experts lie where, by the load that was measured: busy ones get copies in spare places, and all are packed so
that every part of the ranks has as much to do. Arithmetic alone; every rank computes the same from the same loads."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

WORTH = 1.05  # weights move only for a busiest part that is so much less busy


def balanced(loads: Sequence[float], parts: int, now: Sequence[int]) -> tuple[int, ...]:
    """Which expert lies in each place of `parts` equal parts, given each expert's load; as `now` unless it is better by
    some percent."""
    found = _packed(loads, parts, len(now) // parts)
    is_better = busiest(loads, parts, now) > WORTH * busiest(loads, parts, found)
    return found if is_better else tuple(now)


def busiest(loads: Sequence[float], parts: int, slots: Sequence[int]) -> float:
    """The load of the busiest part over that of an average one; an expert's load is shared evenly by its copies."""
    held = part_loads(loads, parts, slots)
    return max(held) * parts / sum(held) if sum(held) else 1.0


def part_loads(loads: Sequence[float], parts: int, slots: Sequence[int]) -> list[float]:
    copies = [0] * len(loads)
    for expert in slots:
        copies[expert] += 1
    each = len(slots) // parts
    return [sum(loads[e] / copies[e] for e in slots[p * each : (p + 1) * each]) for p in range(parts)]


def _packed(loads: Sequence[float], parts: int, each: int) -> tuple[int, ...]:
    """A copy more for whichever expert has most to do per copy, until all places are taken; then the largest first, to
    the part with least to do that has room and not the same expert already."""
    copies = [1] * len(loads)
    heap = [(-load, e) for e, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(parts * each - len(loads)):
        _, e = heapq.heappop(heap)
        copies[e] += 1
        # More copies than parts would lie side by side and share nothing.
        heapq.heappush(heap, (-loads[e] / copies[e] if copies[e] < parts else 1.0, e))
    wanted = sorted(((loads[e] / n, e) for e, n in enumerate(copies) for _ in range(n)), key=lambda x: (-x[0], x[1]))
    held: list[list[int]] = [[] for _ in range(parts)]
    work = [0.0] * parts
    for load, e in wanted:
        part = min((p for p in range(parts) if len(held[p]) < each), key=lambda p: (e in held[p], work[p], p))
        held[part].append(e)
        work[part] += load
    return tuple(e for own in held for e in sorted(own))
