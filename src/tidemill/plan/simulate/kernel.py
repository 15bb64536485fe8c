"""Virtual time: a heap of what happens next, and tasks that wait in it.

A task is plain blocking code in a greenlet: `wait` gives the word back until the time has come or somebody wakes it. So
the real workers of stages run unchanged, and a thousand of them cost a heap, not a thousand threads.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

FOREVER = float("inf")


class Killed(BaseException):
    """Ends a task from outside."""


class Event:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("happens",)

    def __init__(self, happens: Callable[[], None] | None) -> None:
        self.happens = happens

    def cancel(self) -> None:
        self.happens = None


class Kernel:
    def __init__(self) -> None:
        self.time = 0.0
        self.hub: Any = getcurrent()  # who runs the events
        self._heap: list[tuple[float, int, Event]] = []
        self._number = itertools.count()
        self.events = 0  # that have happened

    def now(self) -> float:
        return self.time

    def at(self, when: float, happens: Callable[[], None]) -> Event:
        event = Event(happens)
        heapq.heappush(self._heap, (max(when, self.time), next(self._number), event))
        return event

    def after(self, seconds: float, happens: Callable[[], None]) -> Event:
        return self.at(self.time + seconds, happens)

    @property
    def next_time(self) -> float:
        while self._heap and self._heap[0][2].happens is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else FOREVER

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        """Let things happen until a time, or until `is_over` says so when all of a moment has happened."""
        while (due := self.next_time) <= until and due < FOREVER:
            self.time, _, event = heapq.heappop(self._heap)
            happens, event.happens = event.happens, None
            self.events += 1
            if happens is not None:
                happens()
            if self.next_time > self.time and is_over():
                return
        if until < FOREVER:
            self.time = max(self.time, until)


class Task:
    """Blocking code that lives in virtual time."""

    def __init__(self, kernel: Kernel, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        self.kernel, self._work, self._failed = kernel, work, failed
        self._body: Any = greenlet(self._run, kernel.hub)
        self._timer: Event | None = None
        self.is_waiting = False
        self._was_woken = False
        self.is_dead = False
        kernel.at(kernel.time, self._begin)

    def _begin(self) -> None:
        if not self.is_dead:
            self._body.switch()

    def _run(self) -> None:
        try:
            self._work()
        except Killed:
            pass
        except BaseException as error:
            self._failed(error)
        self.is_dead = True

    def wait(self, seconds: float = FOREVER) -> bool:
        """Until so much time has passed, or somebody wakes it; whether somebody did."""
        self.is_waiting, self._was_woken = True, False
        self._timer = self.kernel.after(seconds, self._go_on) if seconds < FOREVER else None
        self.kernel.hub.switch()
        if self.is_dead:
            raise Killed
        return self._was_woken

    def _go_on(self) -> None:
        if self.is_waiting:
            self.is_waiting = False
            self._body.switch()

    def wake(self) -> None:
        """Now, if it waits; it goes on when this moment's events are through."""
        if self.is_waiting and not self._was_woken:
            self._was_woken = True
            if self._timer is not None:
                self._timer.cancel()
            self.kernel.at(self.kernel.time, self._go_on)

    def kill(self) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        if self._timer is not None:
            self._timer.cancel()
        if self.is_waiting:  # its greenlet ends with what it holds
            self.is_waiting = False
            if getcurrent() is self.kernel.hub:
                self._body.switch()
            else:
                self.kernel.at(self.kernel.time, self._body.switch)
