"""A logger in a thread of its own: a step hands its metrics over and goes on, whatever the logger does with them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from tidemill.observe.loggers import api
from tidemill.observe.loggers.api import Logger, RunInfo

CLOSE_S = 30.0  # the longest that the end of a run waits for all of its loggers
MOST = 10_000  # entries that wait for a slow logger; more are dropped, and that is told

Told = Callable[[str], None]


class Background:
    """Makes the logger in its thread too: importing its package takes seconds that no step should wait for."""

    def __init__(self, name: str, make: Callable[[], Logger], note: Told = lambda _: None) -> None:
        self.name, self.note = name, note
        self.failure = ""
        self._dropped = 0
        self._queue: queue.Queue[tuple[int, dict[str, float]] | tuple[str, str] | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"log-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put((step, dict(metrics)))

    def event(self, kind: str, text: str) -> None:
        self._put((kind, text))

    def close(self, deadline: float) -> str:
        """A sentence where not everything arrived."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self.failure:
            self.failure = self._sentence(f"it was still at work {CLOSE_S:g} s after the run's end")
        elif self._dropped and not self.failure:
            self.failure = self._sentence(f"it was too slow, and {self._dropped} entries were dropped")
        return self.failure

    def _put(self, entry: tuple[int, dict[str, float]] | tuple[str, str]) -> None:
        if self.failure:
            return
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._dropped += 1

    def _run(self, make: Callable[[], Logger]) -> None:
        try:
            logger = make()
            while (entry := self._queue.get()) is not None:
                if isinstance(entry[0], int):
                    logger.log(entry[0], entry[1])
                else:
                    logger.event(entry[0], entry[1])
            logger.close()
        except BaseException as error:  # whatever a logger does, training goes on; SystemExit too
            first = (str(error).splitlines() or [""])[0] or type(error).__name__
            hint = f"; pip install 'tidemill[{self.name}]'" if _is_missing(error) and self.name in api.EXTRAS else ""
            self.failure = self._sentence(f"{first}{hint}")
            self.note(self.failure)

    def _sentence(self, why: str) -> str:
        return f"{api.TITLES[self.name]} events were not all written: {why} (metrics.jsonl has everything)"


def _is_missing(error: BaseException) -> bool:
    return isinstance(error, ModuleNotFoundError)


def start(names: Sequence[str], run: RunInfo, note: Told = lambda _: None) -> list[Background]:
    def making(name: str) -> Callable[[], Logger]:
        return lambda: api.make(name, run)

    return [Background(name, making(name), note) for name in dict.fromkeys(names)]


def close(loggers: Sequence[Background]) -> str:
    """Every logger's failure that has not been told, in one sentence each; they share one deadline."""
    deadline = time.monotonic() + CLOSE_S
    return "\n".join(failure for logger in loggers if (failure := logger.close(deadline)))
