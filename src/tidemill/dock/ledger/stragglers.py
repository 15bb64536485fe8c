"""Stragglers: what one consumer has held far longer than others take is lent to a second one as well.

Whoever commits first counts; the other's lease is then no longer held, and its commit is refused. Rows are counted as
leased once, however many hold them.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from tidemill.dock.ledger.records import HeldLease

LATE_FACTOR = 3.0  # a straggler has taken this many times the median of those that ended
LEAST_S = 2.0  # and not less: a second try of what takes no time costs more than it saves
LEAST_ENDED = 8  # before that there is no median worth the name
REMEMBERED = 256  # ended leases over which the median is taken


class ConsumerPace:
    """How long leases of one stage are held until they are committed."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def limit_s(self) -> float | None:
        """From here on a lease is late; None while nothing is known."""
        if len(self._seconds) < LEAST_ENDED:
            return None
        return max(LEAST_S, LATE_FACTOR * statistics.median(self._seconds))


def latest(held: Iterable[tuple[int, HeldLease]], limit_s: float, now: float, owner: bytes) -> int | None:
    """The lease that is latest, of those that nobody else works on and that are not the asker's own."""
    late = [
        (lease.since, key)
        for key, lease in held
        if not lease.twin and now - lease.since > limit_s and (not owner or lease.owner != owner)
    ]
    return min(late)[1] if late else None
