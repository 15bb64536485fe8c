"""Parked takes: served in order of arrival, none delayed by another that cannot be served. Also parked waits for a
stage's progress."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tidemill.dock.api import Progress, Until, Want
from tidemill.dock.ledger.ledger import Ledger
from tidemill.dock.ledger.records import Grant
from tidemill.errors import DockError


@dataclass(slots=True, eq=False)
class Waiter:
    stage: str
    want: Want
    deadline: float
    answer: Callable[[Grant | DockError | None], None]  # called once; None: the deadline has passed
    client: bytes = b""  # the waiting connection
    owner: bytes = b""  # of the lease to come
    since: float = 0.0  # the longest waiting is served first


@dataclass(slots=True, eq=False)
class ProgressWaiter:
    stage: str
    tag: str | None
    until: Until
    deadline: float
    answer: Callable[[Progress], None]  # called once
    client: bytes = b""


class Waiters:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._parked: dict[str, list[Waiter]] = {}
        self._watching: list[ProgressWaiter] = []

    def park(self, waiter: Waiter) -> None:
        insort(self._parked.setdefault(waiter.stage, []), waiter, key=lambda w: w.since)

    def remove(self, waiter: Waiter) -> None:
        parked = self._parked.get(waiter.stage, [])
        if waiter in parked:
            parked.remove(waiter)

    def forget(self, client: bytes) -> None:
        """Remove a connection that has gone: nothing may be leased to it."""
        for stage, parked in self._parked.items():
            self._parked[stage] = [waiter for waiter in parked if waiter.client != client]
        self._watching = [waiter for waiter in self._watching if waiter.client != client]

    def watch(self, waiter: ProgressWaiter) -> None:
        self._watching.append(waiter)

    def serve(self, now: float) -> None:
        """Serve waiters after a step: lease what became ready, and announce progress."""
        touched, self._ledger.touched = self._ledger.touched, set()
        for stage in touched:
            self._serve(stage, now)
        if self._watching:
            self._announce(lambda w: self._ledger.controller(w.stage).holds(w.until, w.tag))

    def expire(self, now: float) -> None:
        for parked in self._parked.values():
            for waiter in [w for w in parked if w.deadline <= now]:
                parked.remove(waiter)
                waiter.answer(None)
        self._announce(lambda waiter: waiter.deadline <= now)

    def _announce(self, is_due: Callable[[ProgressWaiter], bool]) -> None:
        for waiter in [waiter for waiter in self._watching if is_due(waiter)]:
            self._watching.remove(waiter)
            waiter.answer(self._ledger.progress(waiter.stage, waiter.tag))

    def next_deadline(self) -> float | None:
        return min((w.deadline for w in self.all()), default=None)

    def count(self, stage: str) -> int:
        return len(self._parked.get(stage, ()))

    def all(self) -> Iterable[Waiter]:
        return (waiter for parked in self._parked.values() for waiter in parked)

    def _serve(self, stage: str, now: float) -> None:
        ready, groups = self._ledger.controller(stage).ready, self._ledger.groups
        for waiter in list(self._parked.get(stage, ())):
            if not ready.count and waiter.want.ranks == 1 and not groups.has_unsized:
                continue  # with hundreds of waiters, most cannot be served
            try:
                answer: Grant | DockError | None = self._ledger.take(stage, waiter.want, now, waiter.owner)
            except DockError as error:  # the waiter's mistake, not that of the caller whose step woke it
                answer = error
            except Exception as error:
                answer = DockError(f"this take cannot be served: {error}", "check what it wants")
            if answer is not None:
                self._parked[stage].remove(waiter)
                waiter.answer(answer)
