"""Host: the body of a worker process. One thread does all the work: orders first, then whatever its open stages have.

It knows nothing of who started it; Ray actors and plain processes hold one each and hand messages to `answer`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.cluster.report import UNORDERED, Answer, Failure, WorkerReady, WorkerReport
from tidemill.errors import DockError, TidemillError

if TYPE_CHECKING:
    from tidemill.cluster.assignment import Assignment
    from tidemill.cluster.worker.commands import Orders

NAME = "TIDEMILL_WORKER"  # in the environment of a worker and of what it starts
IDLE_S = (0.001, 0.02)  # between polls when nothing moves: at first, at most


class Host:
    def __init__(self, name: str, logs: str) -> None:
        self.name = name
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], str, Future[Any]]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._early: dict[int, tuple[Callable[[], Any], str, Future[Any]]] = {}  # orders before their turn
        self._next = 0
        self._serial = self._moves = 0
        self._doing, self._since = "starting", time.monotonic()
        self._failure: Failure | None = None
        self._is_stopping = False
        self._work: Orders | None = None
        keep_logs(name, Path(logs))
        os.environ |= {"PYTHONBREAKPOINT": f"{__name__}.no_terminal", NAME: name}
        self._thread = threading.Thread(target=self._run, name="work", daemon=True)
        self._thread.start()

    def answer(self, method: str, args: tuple[Any, ...], number: int = UNORDERED) -> Answer:
        """Called from any thread, several at a time. Orders are carried out as they are numbered: channels may deliver
        them in another order."""
        try:
            if number == UNORDERED:
                return Answer(getattr(self, f"on_{method}")(*args))
            done: Future[Any] = Future()
            with self._changed:
                self._early[number] = (lambda: getattr(self._equipped(), method)(*args), method, done)
                while self._next in self._early:
                    self._orders.put(self._early.pop(self._next))
                    self._next += 1
            return Answer(done.result())
        except BaseException as error:
            print(f"{method} failed:", *traceback.format_exception(error), sep="\n", file=sys.stderr, flush=True)
            return Answer(failure=Failure.of(error))

    # Asked directly, whatever the work is at

    def on_watch(self, seen: int, wait_s: float) -> WorkerReport:
        """As soon as something the driver waits for has happened since `seen`, at the latest after `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._serial != seen, wait_s)
        return self.report()

    def on_stacks(self) -> str:
        names = {t.ident: t.name for t in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
        return "\n".join(parts)

    def on_equip(self, task: Assignment) -> WorkerReady:
        started = time.monotonic()
        done: Future[Any] = Future()
        self._orders.put((lambda: self._equip(task), "equip", done))
        parameters = done.result()
        return WorkerReady(os.getpid(), socket.gethostname(), parameters, time.monotonic() - started)

    def on_leave(self, ledger: str) -> None:
        """The dock. What is under way there ends at once, instead of waiting for it to come back."""
        if self._work is not None:
            self._work.leave(ledger)

    def on_where(self) -> tuple[str, str]:
        """The node this process is on, and the address that others reach it by."""
        return "node0", "127.0.0.1"

    def report(self) -> WorkerReport:
        work = self._work
        operation = work.operation if work is not None else None
        now = time.monotonic()
        return WorkerReport(
            name=self.name,
            serial=self._serial,
            doing=self._doing,
            since_s=now - self._since,
            moves=self._moves + (work.kit.judged if work is not None else 0),
            failure=self._failure,
            operation=operation[0] if operation else "",
            operation_s=now - operation[1] if operation else 0.0,
            **(work.facts() if work is not None else {}),
        )

    # The work

    def _equip(self, task: Assignment) -> int:
        from tidemill.cluster.worker.commands import Orders  # brings torch: whoever only speaks to workers is spared it

        self._work = Orders(task)
        return self._work.parameters

    def _equipped(self) -> Orders:
        if self._work is None:
            raise RuntimeError(f"{self.name} has no equipment yet")
        return self._work

    def _run(self) -> None:
        idle = IDLE_S[0]
        while not self._is_stopping:
            if self._obey(0.0) or self._poll() or self._obey(idle):
                idle = IDLE_S[0]
            else:
                idle = min(IDLE_S[1], idle * 1.5)

    def _obey(self, wait_s: float) -> bool:
        """Carry out the orders that have come, or the first to come within `wait_s`."""
        try:
            order, name, done = self._orders.get(timeout=wait_s) if wait_s else self._orders.get_nowait()
        except queue.Empty:
            return False
        self._now(name)
        try:
            done.set_result(order())
        except BaseException as error:
            done.set_exception(error)
        self._now("")
        self._say()
        return True

    def _poll(self) -> bool:
        work = self._work
        if work is None or work.is_leaving or self._failure is not None:
            return False
        moved, was_done = False, work.is_done
        try:
            moved = work.follow()
            for stage in work.open:
                self._now(stage)
                moved = work.poll(stage) or moved
        except BaseException as error:
            if not (work.is_leaving and isinstance(error, DockError)):
                traceback.print_exc()
                self._failure = Failure.of(error)
        self._now("")
        self._moves += moved
        if self._failure is not None or work.is_done != was_done:
            self._say()
        return moved

    def _now(self, doing: str) -> None:
        if doing != self._doing:
            self._doing, self._since = doing, time.monotonic()

    def _say(self) -> None:
        with self._changed:
            self._serial += 1
            self._changed.notify_all()


def no_terminal(*_: Any, **__: Any) -> None:
    """What breakpoint() does in a worker, and in processes that it starts."""
    frame = sys._getframe(1)
    raise TidemillError(
        f"breakpoint() at {frame.f_code.co_filename}:{frame.f_lineno} in {os.environ.get(NAME, 'a worker')}, "
        "which has no terminal",
        "run the same recipe with cluster.executor=local, where breakpoint() works; or look at a running worker with "
        "`tidemill stacks RUN`",
    )


def keep_logs(name: str, logs: Path) -> None:
    """Whatever this process prints goes to its own file; a signal makes it write its stacks beside it."""
    with contextlib.suppress(OSError):
        logs.mkdir(parents=True, exist_ok=True)
        file = os.open(logs / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)
        stacks = (logs / f"{name}.stacks").open("w")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(file=sys.stderr)
