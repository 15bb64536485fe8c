"""LocalDock: the dock inside one process, for its threads. The ledger is behind a lock, the bytes are on the heap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tidemill.batch import Batch, Column
from tidemill.dock.api import DockState, Progress, Until, Want
from tidemill.dock.lease import LeaseRenewer, TakenLease
from tidemill.dock.ledger.counts import Counts, Tallied
from tidemill.dock.ledger.ledger import Ledger
from tidemill.dock.ledger.records import Grant, Written, entry, split
from tidemill.dock.ledger.waiters import ProgressWaiter, Waiter, Waiters
from tidemill.errors import DockError
from tidemill.graph import Stage


class LocalDock:
    def __init__(
        self,
        stages: Sequence[Stage],
        source: Sequence[str] = (),
        lease_s: float = 600.0,
        max_staleness: int | None = None,
        stale: Literal["requeue", "drop"] = "drop",
        clock: Callable[[], float] = time.monotonic,
        group_size: int | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        watch: str = "reward",
        renews: bool = False,
    ) -> None:
        """`renews`: keep every lease taken here alive until it is committed, abandoned or garbage-collected."""
        self._make_ledger: Callable[..., Ledger] = partial(
            Ledger,
            stages,
            lease_s=lease_s,
            max_staleness=max_staleness,
            stale=stale,
            group_size=group_size,
            max_rows=max_rows,
            max_bytes=max_bytes,
            watch=watch,
        )
        self._clock = clock
        self._source = tuple(source)
        self._read_somewhere = frozenset(column for stage in stages for column in stage.reads)
        self._watch = watch
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)  # signalled when a waiter was answered or has room
        self._chunks: dict[int, Batch] = {}
        self._next_chunk = 0
        self._puts_waiting = 0
        self._put_wait_s = 0.0
        self._is_closed = False
        self._ledger = self._make_ledger()
        self._waiters = Waiters(self._ledger)
        self._renewer = LeaseRenewer(self, lease_s) if renews else None

    def put(self, rows: Batch, tag: str = "") -> None:
        ids, group, sizes = entry(rows, self._source)
        written, stored = split(rows, self._read_somewhere, self._watch)
        own = _own(stored)
        with self._lock:
            self._wait_for_room(tag, len(ids), written.nbytes)
            self._ledger.put(ids, group, sizes, self._store(written, own), tag, self._clock())
            self._settle()

    def take(self, stage: str, want: Want, wait: float = 0.0) -> TakenLease | None:
        with self._lock:
            now = self._clock()
            self._expire(now)
            given = self._ledger.take(stage, want, now)
            grant = None if given is None else given.owned()
            self._settle()
            if grant is None and wait > 0 and not self._is_closed:
                grant = self._park(stage, want, now + wait)
            if grant is None:
                return None
            chunks = {key: self._chunks[key] for piece in grant.pieces for key in piece.keys}
        return TakenLease(self, grant, chunks, self._renewer)

    def advance(self, version: int) -> None:
        with self._lock:
            self._ledger.advance(version)
            self._settle()

    def progress(self, stage: str, tag: str | None = None, until: Until | None = None, wait: float = 0.0) -> Progress:
        with self._lock:
            now = self._clock()
            self._expire(now)
            controller = self._ledger.controller(stage)
            if until is not None and wait > 0 and not self._is_closed and not controller.holds(until, tag):
                return self._wait_until(stage, tag, until, now + wait)
            return self._ledger.progress(stage, tag)

    def finished(self, stage: str, tag: str) -> list[int]:
        with self._lock:
            return self._ledger.finished(stage, tag)

    def retag(self, groups: Sequence[int], tag: str) -> None:
        with self._lock:
            self._ledger.retag(groups, tag)
            self._settle()

    def state(self) -> DockState:
        with self._lock:
            now = self._clock()
            self._expire(now)
            return with_waiting(self._ledger.state(now), self._waiters, self._puts_waiting, self._put_wait_s)

    def counted(self) -> Tallied:
        with self._lock:
            return self._ledger.tell(self._ledger.counts.number)

    def close(self) -> None:
        """Wake all waiters; takes then return None at once."""
        with self._lock:
            self._is_closed = True
            self._waiters.expire(float("inf"))
            self._moved.notify_all()
        if self._renewer is not None:
            self._renewer.close()

    # -- a lease's side ----------------------------------------------------------------------------------------------

    def commit_lease(self, grant: Grant, outputs: Batch, drop: Sequence[int], counts: Counts | None) -> None:
        written, stored = split(outputs, self._read_somewhere, self._watch)
        own = _own(stored)
        with self._lock:
            placed = self._store(written if counts is None else replace(written, counts=counts), own)
            try:
                self._ledger.commit(grant.lease, placed, drop, self._clock())
            except DockError:
                self._chunks.pop(placed.chunk, None)
                raise
            finally:
                self._settle()

    def renew_lease(self, grant: Grant) -> None:
        with self._lock:
            try:
                self._ledger.renew(grant.lease, self._clock())
            finally:
                self._settle()

    def abandon_lease(self, grant: Grant) -> None:
        with self._lock:
            self._ledger.abandon(grant.lease)
            self._settle()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _store(self, written: Written, stored: Batch) -> Written:
        if not len(stored):
            return written
        key = self._next_chunk
        self._next_chunk += 1
        self._chunks[key] = stored
        return replace(written, chunk=key)

    def _settle(self) -> None:
        """Free bytes and serve waiters, after every step."""
        self._waiters.serve(self._clock())
        freed, self._ledger.chunks.freed = self._ledger.chunks.freed, []
        for key in freed:
            self._chunks.pop(key, None)
        if self._puts_waiting:
            self._moved.notify_all()

    def _expire(self, now: float) -> None:
        if self._ledger.expire(now):
            self._settle()

    def _park(self, stage: str, want: Want, deadline: float) -> Grant | None:
        """Wait until another thread's step serves us or `deadline` passes."""
        answers: list[Grant | DockError | None] = []

        def answer(given: Grant | DockError | None) -> None:
            answers.append(given.owned() if isinstance(given, Grant) else given)
            self._moved.notify_all()

        waiter = Waiter(stage, want, deadline, answer, since=self._clock())
        self._waiters.park(waiter)
        self._sleep(answers, deadline)
        if not answers:
            self._waiters.remove(waiter)
            return None
        if isinstance(answers[0], DockError):
            raise answers[0]
        return answers[0]

    def _wait_until(self, stage: str, tag: str | None, until: Until, deadline: float) -> Progress:
        answers: list[Progress] = []

        def answer(progress: Progress) -> None:
            answers.append(progress)
            self._moved.notify_all()

        self._waiters.watch(ProgressWaiter(stage, tag, until, deadline, answer))
        self._sleep(answers, deadline)
        if not answers:
            self._waiters.expire(deadline)
        return answers[0]

    def _sleep(self, answers: list[Any], deadline: float) -> None:
        """Sleep without the lock until there is an answer or `deadline` passes. A sleeper also expires leases."""
        while not answers and (now := self._clock()) < deadline:
            due = self._ledger.leases.next_deadline()
            self._moved.wait(max(0.0, (deadline if due is None else min(deadline, due)) - now))
            self._expire(self._clock())

    def _wait_for_room(self, tag: str, rows: int, nbytes: int) -> None:
        if self._ledger.chunks.has_room(tag, rows, nbytes):
            return
        started = self._clock()
        self._puts_waiting += 1
        try:
            while not self._ledger.chunks.has_room(tag, rows, nbytes) and not self._is_closed:
                self._moved.wait()
        finally:
            self._puts_waiting -= 1
            self._put_wait_s += self._clock() - started
        if self._is_closed:
            raise DockError("the dock was closed while this put waited for room")


def with_waiting(state: DockState, waiters: Waiters, puts_waiting: int, put_wait_s: float) -> DockState:
    waiting = {name: n for name in state.stages if (n := waiters.count(name))}
    if not waiting and not puts_waiting and not put_wait_s:
        return state
    stages = state.stages | {name: replace(state.stages[name], waiting=n) for name, n in waiting.items()}
    return replace(state, stages=stages, puts_waiting=puts_waiting, put_wait_s=put_wait_s)


def _own(rows: Batch) -> Batch:
    """Return a copy that neither the producer nor a reader can change afterwards."""
    return Batch({name: _own_column(column) for name, column in rows.items()})


def _own_column(given: Column) -> Column:
    c = given.base
    values, offsets = _frozen(c.values), None if c.offsets is None else _frozen(c.offsets)
    own = c if values is c.values and offsets is c.offsets else Column(values, offsets, c.is_text)
    return own if given.index is None else own.grouped(_frozen(given.index))


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not array.flags.writeable and array.base is None:
        return array  # its owner has given up writing to it
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy
