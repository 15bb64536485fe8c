"""KeptDock: a worker's hand in the dock whose leases are renewed while the process lives.

Leases can be short, then: what a dead worker held is given to another within `lease_s`, however long a piece of work
takes a living one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from tidemill.batch import Batch
from tidemill.dock import Counts, Dock, DockState, Lease, LeaseExpired, Tallied, Want
from tidemill.errors import DockError

RENEWALS = 4  # in the life of a lease: three may be late


class KeptLease:
    def __init__(self, keeper: KeptDock, inner: Lease) -> None:
        self._keeper, self._inner = keeper, inner
        self.is_lost = False  # its rows are someone else's now

    @property
    def batch(self) -> Batch:
        return self._inner.batch

    def commit(self, outputs: Batch | None = None, drop: Sequence[int] = (), counts: Counts | None = None) -> None:
        self._keeper.forget(self)
        self._inner.commit(outputs, drop, counts)

    def renew(self) -> None:
        """Whether it is still held shows in `is_lost`, and in its commit."""
        try:
            self._inner.renew()
        except LeaseExpired:
            self.is_lost = True
            self._keeper.forget(self)

    def abandon(self) -> None:
        self._keeper.forget(self)
        with contextlib.suppress(LeaseExpired):
            self._inner.abandon()


class KeptDock:
    def __init__(self, inner: Dock, lease_s: float) -> None:
        self.inner = inner
        self.renewed = self.lost = 0
        self._every_s = lease_s / RENEWALS
        self._held: dict[int, KeptLease] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)
        self._thread.start()

    @property
    def leases(self) -> int:
        return len(self._held)

    def put(self, rows: Batch, tag: str = "") -> None:
        self.inner.put(rows, tag)

    def take(self, stage: str, want: Want, wait: float = 0.0) -> KeptLease | None:
        lease = self.inner.take(stage, want, wait)
        if lease is None:
            return None
        kept = KeptLease(self, lease)
        with self._lock:
            self._held[id(kept)] = kept
        return kept

    def advance(self, version: int) -> None:
        self.inner.advance(version)

    def state(self) -> DockState:
        return self.inner.state()

    def counted(self) -> Tallied:
        return self.inner.counted()

    def forget(self, lease: KeptLease) -> None:
        with self._lock:
            self._held.pop(id(lease), None)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self.inner.close()

    def _renew(self) -> None:
        while not self._stop.wait(self._every_s):
            with self._lock:
                held = list(self._held.values())
            for lease in held:
                try:
                    lease.renew()
                except DockError:
                    break  # the ledger is on its way back; the next round tells
                self.renewed += not lease.is_lost
                self.lost += lease.is_lost
