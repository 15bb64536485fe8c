"""TakenLease: the lease that a take gives, whichever form of dock gave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tidemill.batch import Batch
from tidemill.dock.ledger.counts import Counts
from tidemill.dock.ledger.records import Grant
from tidemill.dock.store.buffer import PackedBuffer
from tidemill.dock.store.gather import StoredColumns, assemble
from tidemill.errors import DockError


class Giver(Protocol):
    """The dock's side of a lease."""

    def commit_lease(self, grant: Grant, outputs: Batch, drop: Sequence[int], counts: Counts | None) -> None: ...

    def renew_lease(self, grant: Grant) -> None: ...

    def abandon_lease(self, grant: Grant) -> None: ...


class TakenLease:
    def __init__(self, giver: Giver, grant: Grant, stored: Mapping[int, StoredColumns]) -> None:
        self._giver, self._grant, self._stored = giver, grant, stored

    @cached_property
    def batch(self) -> Batch:
        """Views of the store where the rows lie together, else one copy."""
        return assemble(self._grant, self._stored)

    def packed(self, buffer: PackedBuffer) -> Batch:
        """The batch gathered into `buffer`, in one copy; valid until the buffer's next use."""
        return assemble(self._grant, self._stored, buffer.allocate)

    @property
    def deadline(self) -> float:
        return self._grant.deadline

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Of the rows, in the batch's order."""
        return self._grant.ids

    def commit(self, outputs: Batch | None = None, drop: Sequence[int] = (), counts: Counts | None = None) -> None:
        given, rows = outputs or Batch({}), self._grant.rows
        if len(given) and given.rows != rows:
            raise DockError(f"outputs must have a row for each of the lease's {rows} rows, got {given.rows}")
        if counts is not None:
            counts.check(rows)
        self._giver.commit_lease(self._grant, given, drop, counts)

    def renew(self) -> None:
        self._giver.renew_lease(self._grant)

    def abandon(self) -> None:
        self._giver.abandon_lease(self._grant)
