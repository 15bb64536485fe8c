"""Workers: each takes what its stage may read from the dock, works on it, and commits what the stage writes. A worker
is polled: `poll` does a bounded piece of work and returns whether anything moved; the schedule decides whom to poll."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidemill.batch import Batch
from tidemill.dock import Counts, Lease, LeaseExpired


class Worker(Protocol):
    name: str  # its stage

    def begin(self, first_group: int, tag: str | None) -> None:
        """Begin a step, whose groups count from `first_group`. `tag` marks its rows; None: no other step has rows
        here."""

    def poll(self) -> bool:
        """Do a bounded piece of work; return whether anything moved."""

    @property
    def waits(self) -> bool:
        """Whether another thread or process is working on something that this worker will commit."""


def at_any_time() -> None:
    """Do nothing: this worker shares no memory with another."""


def committed(
    lease: Lease, outputs: Batch | None = None, drop: Sequence[int] = (), counts: Counts | None = None
) -> bool:
    """Commit; return False when the rows were given to another worker meanwhile, which does the work again."""
    try:
        lease.commit(outputs, drop, counts)
    except LeaseExpired:
        return False
    return True
