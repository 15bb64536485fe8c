"""Workers that run ahead: one in a thread of its own, so that it and the others work at the same time; several as one.

The dock keeps them apart: the thread takes leases and commits like any worker. Whoever polls sees only whether samples
came out, and every error the thread met.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from tidemill.dock import Dock
from tidemill.flow.rolling import RolloutWorker
from tidemill.flow.stage import Worker

PATIENCE_S = 0.1  # longest the thread waits in the dock before it looks whether it should end
BEAT_S = 1.0  # how often work that finished no sample yet counts as a move: a run that decodes does not stand still
JOIN_S = 30.0


class Beside:
    """Implements `Worker` for a rollout worker that runs on. The thread starts with the first poll."""

    runs_beside = True

    def __init__(self, inner: RolloutWorker, dock: Dock) -> None:
        self.inner, self.dock, self.name = inner, dock, inner.name
        inner.patience_s = PATIENCE_S
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._error: BaseException | None = None
        self._steps = 0  # by the thread
        self._told = (0, 0, 0.0)  # what the last poll saw: steps, groups finished, when

    def begin(self, first_group: int, tag: str | None) -> None:
        """Rollout takes whatever is in the dock: who may be ahead is decided by what is put there."""

    @property
    def waits(self) -> bool:
        return not self.dock.progress(self.name).is_idle

    def poll(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"tidemill-{self.name}", daemon=True)
            self._thread.start()
        if self._error is not None:
            raise self._error
        steps, finished, at = self._told
        now = time.monotonic()
        has_finished = self.inner.finished != finished
        has_moved = has_finished or (self._steps != steps and now - at > BEAT_S)
        if has_moved:
            self._told = self._steps, self.inner.finished, now
        return has_moved

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._steps += self.inner.poll()
        except BaseException as error:  # raised again by `poll`, in the thread that can end the run
            self._error = error


class EveryStep:
    """One worker for each step that may be in the dock, as one: so that what replaces a step's dropped groups is on its
    way before the step is learned from. For stages that look at groups alone and not at a whole step."""

    waits = False
    runs_beside = False

    def __init__(self, name: str, workers: Sequence[Worker]) -> None:
        self.name, self.workers = name, workers

    def begin(self, first_group: int, tag: str | None) -> None:
        """Each has its tag already."""

    def poll(self) -> bool:
        moves = [worker.poll() for worker in self.workers]
        return any(moves)
