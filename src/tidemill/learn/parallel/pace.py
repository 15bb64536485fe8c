"""Who is slow: how long each rank computes between collectives, and which one the others wait for.

In a collective all ranks wait for the last one. What tells a slow rank from those that wait for it is the time it
spends outside of them; the same work takes it longer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tidemill.learn.parallel.collectives import MeshLink
from tidemill.learn.parallel.flight import Flight


class RankPace:
    """Of one rank, since the last report."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self.seconds = 0.0  # computing, waits not counted

    @contextmanager
    def busy(self) -> Iterator[None]:
        began, waited = time.monotonic(), sum(self.flight.seconds.values())
        yield
        self.seconds += time.monotonic() - began - (sum(self.flight.seconds.values()) - waited)

    def report(self, world: MeshLink) -> dict[str, float]:
        """On every rank the same: the slowest, and how much longer it computes than the one in the middle."""
        own, self.seconds = self.seconds, 0.0
        if world.size == 1:
            return {}
        found = world.gather_plain(own)
        middle = statistics.median(found)
        return {
            "slowest_rank": float(max(range(len(found)), key=lambda r: found[r])),
            "slowest_over_median": max(found) / middle if middle > 0 else 1.0,
        }
