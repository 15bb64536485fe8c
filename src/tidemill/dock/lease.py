"""TakenLease: the lease that a take returns, for every form of dock; and the one place where leases are renewed.
Renewed leases can be short: what a dead worker held is given to another within `lease_s`, however long a piece of work
takes a living one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tidemill.batch import Batch
from tidemill.dock.api import LeaseExpired
from tidemill.dock.ledger.counts import Counts
from tidemill.dock.ledger.records import Grant
from tidemill.dock.store.buffer import PackedBuffer
from tidemill.dock.store.gather import StoredColumns, assemble
from tidemill.errors import DockError

RENEWALS = 4  # renewals in the life of a lease: three may be late


class Giver(Protocol):
    """The dock's side of a lease."""

    def commit_lease(self, grant: Grant, outputs: Batch, drop: Sequence[int], counts: Counts | None) -> None: ...

    def renew_lease(self, grant: Grant) -> None: ...

    def abandon_lease(self, grant: Grant) -> None: ...


class LeaseRenewer:
    """Renews the leases of one dock object while this process lives and works on them. A lease that is
    garbage-collected is not renewed: it expires."""

    def __init__(self, dock: object, lease_s: float) -> None:
        self.lost = 0
        self._held: weakref.WeakSet[TakenLease] = weakref.WeakSet()
        self._lock, self._stop = threading.Lock(), threading.Event()
        threading.Thread(target=self._renew, args=(lease_s / RENEWALS,), name="leases", daemon=True).start()
        weakref.finalize(dock, self._stop.set)  # a dock that nobody closed

    def __len__(self) -> int:
        return len(self._held)

    def add(self, lease: TakenLease) -> None:
        with self._lock:
            self._held.add(lease)

    def forget(self, lease: TakenLease) -> None:
        with self._lock:
            self._held.discard(lease)

    def close(self) -> None:
        """Stop renewing. The thread ends by itself, because it may be waiting for an answer."""
        self._stop.set()

    def renew_all(self) -> None:
        with self._lock:
            held = list(self._held)
        for lease in held:
            try:
                lease.renew()
            except LeaseExpired:
                self.lost += 1
            except DockError:
                return  # the ledger is restarting; the next round will show

    def _renew(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            self.renew_all()


class TakenLease:
    def __init__(
        self,
        giver: Giver,
        grant: Grant,
        stored: Mapping[int, StoredColumns],
        renewer: LeaseRenewer | None = None,
    ) -> None:
        self._giver, self._grant, self._stored, self._renewer = giver, grant, stored, renewer
        self.is_lost = False
        if renewer is not None:
            renewer.add(self)

    @cached_property
    def batch(self) -> Batch:
        """The rows: views of the store where they lie together, else one copy."""
        return assemble(self._grant, self._stored)

    def packed(self, buffer: PackedBuffer) -> Batch:
        """Gather the batch into `buffer`, in one copy; valid until the buffer's next use."""
        return assemble(self._grant, self._stored, buffer.allocate)

    @property
    def deadline(self) -> float:
        return self._grant.deadline

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The rows' ids, in the batch's order."""
        return self._grant.ids

    def commit(self, outputs: Batch | None = None, drop: Sequence[int] = (), counts: Counts | None = None) -> None:
        given, rows = outputs or Batch({}), self._grant.rows
        if len(given) and given.rows != rows:
            raise DockError(f"outputs must have a row for each of the lease's {rows} rows, got {given.rows}")
        if counts is not None:
            counts.check(rows)
        self._end()
        try:
            self._giver.commit_lease(self._grant, given, drop, counts)
        except LeaseExpired:
            self.is_lost = True
            raise

    def renew(self) -> None:
        try:
            self._giver.renew_lease(self._grant)
        except LeaseExpired:
            self.is_lost = True
            self._end()
            raise

    def abandon(self) -> None:
        self._end()
        self._giver.abandon_lease(self._grant)

    def _end(self) -> None:
        if self._renewer is not None:
            self._renewer.forget(self)
