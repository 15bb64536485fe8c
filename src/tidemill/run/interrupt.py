"""Ctrl-C and SIGTERM end a run at the next safe moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tidemill.run.summary import Watcher


@contextmanager
def interruptions(watch: Watcher) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the run at the next safe moment; a second Ctrl-C ends it at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def on_signal(number: int, _: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        watch.noted(f"{signal.Signals(number).name}: stopping and saving; once more to stop at once")

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
