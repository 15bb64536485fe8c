"""Ctrl-C and SIGTERM end a run at the next safe moment; asking for it also reports what the run is doing."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tidemill.flow.records import Activity
from tidemill.flow.workers import Stopped, Workers
from tidemill.run.watcher import Watcher

R = TypeVar("R")
TELL_EVERY_S = 0.2  # what the run is doing: reported as often as a panel can show it


class Pulse:
    """Say whether the user asked to stop. It is called all the time, so it also reports to the watcher what the run
    is doing."""

    def __init__(self, asked: Callable[[], bool], workers: Workers, watch: Watcher) -> None:
        self.asked, self.workers, self.watch = asked, workers, watch
        self.told_at = 0.0

    def __call__(self) -> bool:
        if self._is_due() and (activity := self.workers.activity()) is not None:
            self.watch.doing(activity)
        return self.asked()

    def evaluating(self, activity: Activity) -> None:
        if self._is_due():
            self.watch.doing(activity)
        if self.asked():
            raise Stopped

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now - self.told_at < TELL_EVERY_S:
            return False
        self.told_at = now
        return True


class Stopwatch:
    """Seconds of a step, without those that whoever drives the run took for other things."""

    def __init__(self) -> None:
        self._began, self.away_s = time.perf_counter(), 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self._began - self.away_s


class Presence:
    """Whether whoever drives the run by its moments is still there. One who leaves closes the generator, which is met
    at the moment that was told last."""

    def __init__(self) -> None:
        self.is_there = True

    @contextmanager
    def elsewhere(self, clock: Stopwatch) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except GeneratorExit:
            self.is_there = False
        finally:
            clock.away_s += time.perf_counter() - began


def drained(moments: Generator[Any, None, R]) -> R:
    """Drive a run to its end; what it came to."""
    while True:
        try:
            next(moments)
        except StopIteration as end:
            found: R = end.value
            return found


@contextmanager
def interruptions(watch: Watcher) -> Iterator[Callable[[], bool]]:
    """Make Ctrl-C and SIGTERM end the run at the next safe moment, and a second Ctrl-C at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def on_signal(number: int, _: Any) -> None:
        if asked.is_set():
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # a scheduler signals every process of a job, and its supervisor forwards the signal: one request
        asked.set()
        watch.noted(f"{signal.Signals(number).name}: stopping and saving; press Ctrl-C again to stop at once")

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
