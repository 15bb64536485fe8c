"""Leases that are held: who has which rows until when, and who has had them too long. Rows that one consumer has held
far longer than usual (a straggler) are leased to a second one, too. The first commit counts; the other lease is then no
longer held, and its commit is refused. Rows count as leased once, however many hold them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tidemill.dock.ledger.records import HeldLease

LATE_FACTOR = 3.0  # a straggler has taken this many times the median of ended leases
LEAST_S = 2.0  # and at least this: repeating quick work costs more than it saves
LEAST_ENDED = 8  # before that the median means little
REMEMBERED_COMMITS = 1 << 13
REMEMBERED = 256  # ended leases over which the median is taken
EPOCH_SHIFT = 40  # lease ids are epoch << 40 | serial: ids from before a restart are never mistaken for new ones


class Committed:
    """The newest leases that were committed, so that a commit which is repeated because its answer was lost is known
    again. All of its memory is taken at the start: a ledger must not seem to grow for thousands of steps."""

    def __init__(self) -> None:
        self._keys = np.full(REMEMBERED_COMMITS, -1, np.int64)
        self._next = 0

    def __contains__(self, key: int) -> bool:
        return bool((self._keys == key).any())

    def add(self, key: int) -> None:
        self._keys[self._next] = key
        self._next = (self._next + 1) % len(self._keys)

    def dump(self) -> npt.NDArray[np.int64]:
        """Return the leases, the oldest first."""
        keys = np.roll(self._keys, -self._next)
        return keys[keys >= 0]

    def load(self, keys: npt.NDArray[np.int64]) -> None:
        for key in keys.tolist():
            self.add(key)


class Leases:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._serial = 0
        self._held: dict[int, HeldLease] = {}
        self._at: dict[int, dict[int, HeldLease]] = {}  # by stage, the oldest first
        self._no_expiry_before = float("inf")  # saves most calls a scan of all leases

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __getitem__(self, key: int) -> HeldLease:
        return self._held[key]

    def add(self, lease: HeldLease) -> int:
        self._serial += 1
        key = self.epoch << EPOCH_SHIFT | self._serial
        self._held[key] = lease
        self._at.setdefault(lease.stage, {})[key] = lease
        self._no_expiry_before = min(self._no_expiry_before, lease.deadline)
        return key

    def pop(self, key: int) -> HeldLease:
        lease = self._held.pop(key)
        del self._at[lease.stage][key]
        return lease

    def overdue(self, now: float) -> list[int]:
        if now < self._no_expiry_before:
            return []
        late = [key for key, lease in self._held.items() if lease.deadline <= now]
        in_time = (lease.deadline for lease in self._held.values() if lease.deadline > now)
        self._no_expiry_before = min(in_time, default=float("inf"))
        return late

    def look_again(self) -> None:
        """A deadline was brought forward from outside."""
        self._no_expiry_before = float("-inf")

    def of(self, owner: bytes) -> list[int]:
        return [key for key, lease in self._held.items() if lease.owner == owner]

    def at(self, stage: int) -> Iterable[tuple[int, HeldLease]]:
        """Return the leases of a stage, the oldest first."""
        return self._at.get(stage, {}).items()

    def next_deadline(self) -> float | None:
        return min((lease.deadline for lease in self._held.values()), default=None)

    def span(self) -> tuple[int, int]:
        """Return serial numbers: of the oldest lease held (or of the next one), and of the last one given."""
        oldest = min(self._held) & ((1 << EPOCH_SHIFT) - 1) if self._held else self._serial + 1
        return oldest, self._serial


class ConsumerPace:
    """How long one stage's leases are held until they are committed."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def limit_s(self) -> float | None:
        """Return the age from which a lease is late; None while nothing is known."""
        if len(self._seconds) < LEAST_ENDED:
            return None
        return max(LEAST_S, LATE_FACTOR * statistics.median(self._seconds))


def latest(held: Iterable[tuple[int, HeldLease]], limit_s: float, now: float, owner: bytes) -> int | None:
    """Return the latest lease, of those that nobody else works on and that are not the caller's own. `held`: the oldest
    first, so that a look costs as much as there are late ones."""
    for key, lease in held:
        if now - lease.since <= limit_s:
            return None
        if not lease.twin and (not owner or lease.owner != owner):
            return key
    return None
