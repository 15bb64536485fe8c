"""Worker processes for reward functions that may hang: a worker that misses a sample's deadline is killed.

Only the sample at fault is lost: the ones behind it go to a fresh worker. Workers start as samples come.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tidemill.reward.api import Sample
from tidemill.reward.workers.outcome import Outcome
from tidemill.reward.workers.wire import JsonSocket

START_S = 120.0  # a worker may import a user's large module; no sample's clock runs meanwhile
MOST_PER_MESSAGE = 32  # units sent at once: saves round trips, keeps lanes even
SENT = tuple(field.name for field in fields(Sample) if field.name not in ("tokens", "images"))


@dataclass(frozen=True, slots=True)
class Unit:
    """One function on one sample; `done` gets the outcome, on a lane's thread."""

    function: int
    sample: Sample
    done: Callable[[Outcome], None]


class Pool:
    """`functions`: names or import paths with their arguments; units refer to them by index."""

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]], workers: int, timeout_s: float) -> None:
        self.functions = [(name, dict(args)) for name, args in functions]
        self.timeout_s = timeout_s
        self._chunks: queue.SimpleQueue[list[Unit] | None] = queue.SimpleQueue()
        self._lanes = [Lane(self, number) for number in range(workers)]
        self._started = 0  # lanes: no more than there were chunks for
        self._lock = threading.Lock()

    def submit(self, units: Sequence[Unit]) -> None:
        size = max(1, min(MOST_PER_MESSAGE, -(-len(units) // (4 * len(self._lanes)))))
        starts = range(0, len(units), size)
        for start in starts:
            self._chunks.put(list(units[start : start + size]))
        with self._lock:
            for lane in self._lanes[self._started : len(starts)]:
                lane.thread.start()
            self._started = max(self._started, min(len(starts), len(self._lanes)))

    def next_chunk(self) -> list[Unit] | None:
        return self._chunks.get()

    def close(self) -> None:
        """Ends the workers at once; units not yet judged are told so."""
        lanes = self._lanes[: self._started]
        for lane in lanes:
            lane.stop()
            self._chunks.put(None)
        for lane in lanes:
            lane.thread.join(timeout=10)
        while not self._chunks.empty():
            for unit in self._chunks.get() or ():
                unit.done(CLOSED)


CLOSED = Outcome(fault="died", why="was not judged: the scorer was closed")


class Lane:
    """A thread and its worker process."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool = pool
        self.thread = threading.Thread(target=self._run, name=f"reward-{number}", daemon=True)
        self.is_closing = False
        self.process: subprocess.Popen[bytes] | None = None
        self.wire: JsonSocket | None = None
        self._lock = threading.Lock()

    def _run(self) -> None:
        while not self.is_closing and (chunk := self.pool.next_chunk()) is not None:
            pending = deque(chunk)
            while pending:
                self._work(pending)
        self.kill()

    def _work(self, pending: deque[Unit]) -> None:
        """Judge until all is done or the worker has to be replaced."""
        if self.is_closing or (failed := self._start()) is not None:
            outcome = CLOSED if self.is_closing else Outcome(fault="died", why=f"could not start: {failed}")
            while pending:
                pending.popleft().done(outcome)
            return
        assert self.wire is not None
        try:
            self.wire.send([(unit.function, as_message(unit.sample)) for unit in pending])
            while pending:
                message = self.wire.receive(self.pool.timeout_s)
                if message is None:
                    self.kill()
                    why = f"took longer than rewards.timeout_s ({self.pool.timeout_s:g} s) and was stopped"
                    pending.popleft().done(Outcome(fault="timed_out", why=why))
                    return
                pending.popleft().done(Outcome(**message))
        except (EOFError, OSError):
            ended = self._how_it_ended()
            if pending and not self.is_closing:
                pending.popleft().done(Outcome(fault="died", why=f"ended its process ({ended})"))

    def _start(self) -> str | None:
        """A running worker, or why there is none."""
        if self.process is not None:
            return None
        ours, theirs = socket.socketpair()
        self.wire = JsonSocket(ours)
        with theirs, self._lock:
            if self.is_closing:
                return "the scorer was closed"
            command = [sys.executable, "-m", "tidemill.reward.workers.worker", str(theirs.fileno())]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "OMP_NUM_THREADS": "1",
            }
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for the run, which ends its workers itself
            )
        try:
            self.wire.send(self.pool.functions)
            message = self.wire.receive(START_S)
        except (EOFError, OSError):
            return f"its process ended ({self._how_it_ended()})"
        if message is None or "failed" in message:
            self.kill()
            return f"no sign of life within {START_S:g} s" if message is None else str(message["failed"])
        return None

    def _how_it_ended(self) -> str:
        process = self.process
        if process is None:
            return "stopped"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        code = process.returncode
        self.kill()
        if code is None:
            return "closed its connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        """End the worker and whatever it started. Only on this lane's thread."""
        with self._lock:
            process, self.process = self.process, None
        if process is not None:
            end_group(process)
            process.wait()
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def stop(self) -> None:
        """From another thread: the lane, reading from a worker that is gone, sees the end of the stream and ends."""
        with self._lock:
            self.is_closing = True
            if self.process is not None:
                end_group(self.process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def as_message(sample: Sample) -> dict[str, Any]:
    """All but tokens and images: functions in workers judge text."""
    return {name: getattr(sample, name) for name in SENT}
