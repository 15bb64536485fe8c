"""Seconds of exchanges between devices of a topology: rings and trees level by level, the way collective libraries go.

A group of ranks meets several levels. What is exchanged inside a level goes over that level's link; what leaves it is a
share, because the ranks of a level each bring their part. Latencies add up, and slower levels are what counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.topology.tree import MICRO, Level, Topology


@dataclass(frozen=True, slots=True)
class Hop:
    """One level that a group spans: among how many of the level below it goes round."""

    level: Level
    count: int


def hops(topology: Topology, ranks: Sequence[int]) -> list[Hop]:
    """The levels that a group of ranks meets, from the inside outwards."""
    found, size, inner = [], 1, len(set(ranks))
    for level in topology.levels:
        size *= level.holds
        groups = len({rank // size for rank in ranks})
        count = -(-inner // groups)
        if count > 1:
            found.append(Hop(level, count))
        inner = groups
    return found


def all_gather_s(topology: Topology, ranks: Sequence[int], size: float) -> float:
    """`size`: bytes of the whole, of which each rank has its part. The same for a reduce-scatter.

    Ranks of one group fetch a share each from outside and pass it round inside, so a level carries what the levels
    inside of it leave: the innermost the whole, the next one that over the innermost's ranks."""
    spent, below = 0.0, 1
    for hop in hops(topology, ranks):
        link = hop.level.link
        spent += (hop.count - 1) / hop.count * size / below / (link.gb_per_s * 1e9)
        spent += (hop.count - 1) * link.us * MICRO
        below *= hop.count
    return spent


def all_reduce_s(topology: Topology, ranks: Sequence[int], size: float) -> float:
    return 2 * all_gather_s(topology, ranks, size)


def all_to_all_s(topology: Topology, ranks: Sequence[int], size: float) -> float:
    """`size`: bytes that each rank sends in all, spread evenly over the others."""
    n, spent = len(ranks), 0.0
    if n < 2:
        return 0.0
    inside = 1
    for hop in hops(topology, ranks):
        own = inside * hop.count
        spent += size * (own - inside) / n / (hop.level.link.gb_per_s * 1e9) + hop.level.link.us * MICRO * hop.count
        inside = own
    return spent


def message_s(topology: Topology, ranks: Sequence[int], size: float) -> float:
    """From each rank to the next; the slowest counts."""
    pairs = itertools.pairwise(ranks)
    return max((topology.seconds(size, one, other) for one, other in pairs), default=0.0)
