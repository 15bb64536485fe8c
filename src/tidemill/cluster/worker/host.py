"""Host: runs a worker. One thread does all the work: commands first, then whatever its open stages have. It does not
know how it was started: as a process of its own, through Ray, or inside the driver's process, whose own thread may do
the work."""

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

from tidemill.cluster.commands import Request
from tidemill.cluster.report import UNORDERED, Answer, Failure, MoveReport, WorkerReady, WorkerReport
from tidemill.errors import DockError, InterpreterError, TidemillError
from tidemill.flow.workers import Stopped
from tidemill.imports import WORKER

if TYPE_CHECKING:
    from tidemill.cluster.assignment import Assignment
    from tidemill.cluster.worker.commands import RoleWorker

IDLE_S = (0.001, 0.02)  # pause between polls when nothing moves: at first, at most
JOIN_S = 30.0
ON_TIMELINE = ("evaluate", "save", "restore", "settle")  # commands that take long and are no stage

Work = tuple[Callable[[], Any], str, Future[Any]]


class Host:
    """Implements `HostCommands`. `start` gives the work a thread; without one, the owner calls `run_once`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._commands: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._early: dict[int, Work] = {}  # commands that arrived before their turn
        self._next = 0
        self.serial = self._moves = 0
        self._doing, self._since = "starting", time.monotonic()
        self.error: BaseException | None = None  # raised by the work
        self._is_stopping = False
        self.worker: RoleWorker | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"work-{self.name}", daemon=True)
        self._thread.start()

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    def answer(self, request: Request[Any], number: int = UNORDERED) -> Answer:
        """Answer a request. Called from any thread, several at a time. Commands are carried out in the order of
        their numbers: channels may deliver them in another."""
        try:
            if request.is_direct:
                return Answer(request.run(self))
            done: Future[Any] = Future()
            with self._changed:
                self._early[number] = (lambda: request.run(self._built()), request.name, done)
                while self._next in self._early:
                    self._commands.put(self._early.pop(self._next))
                    self._next += 1
            return Answer(done.result())
        except BaseException as error:
            if not isinstance(error, Stopped):
                trace = traceback.format_exception(error)
                print(f"{request.name} failed:", *trace, sep="\n", file=sys.stderr, flush=True)
            return Answer(failure=Failure.of(error))

    def give(self, request: Request[Any]) -> Future[Any]:
        """Queue a command after those before it. For the one thread that sends all commands."""
        done: Future[Any] = Future()
        self._commands.put((lambda: request.run(self._built()), request.name, done))
        return done

    # Answered directly, whatever the work is doing

    def where(self) -> tuple[str, str]:
        return "node0", "127.0.0.1"

    def build(self, task: Assignment) -> WorkerReady:
        started = time.monotonic()
        done: Future[Any] = Future()
        self._commands.put((lambda: self._build(task), "build", done))
        if not self.has_thread:
            self._obey(0.0)
        parameters = done.result()
        return WorkerReady(os.getpid(), socket.gethostname(), parameters, time.monotonic() - started)

    def watch(self, seen: int, wait_s: float) -> WorkerReport:
        with self._changed:
            self._changed.wait_for(lambda: self.serial != seen, wait_s)
        return self.report()

    def stacks(self) -> str:
        names = {t.ident: t.name for t in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
        return "\n".join(parts)

    def look(self) -> str:
        return self.stacks()

    def leave(self, ledger: str) -> None:
        if self.worker is not None:
            self.worker.leave(ledger)

    def interrupt(self) -> None:
        if self.worker is not None:
            self.worker.interrupt()

    def receive(self, version: int) -> MoveReport:
        return self._built().weights.receive(version)

    def report(self) -> WorkerReport:
        worker = self.worker
        operation = worker.operation if worker is not None else None
        now = time.monotonic()
        return WorkerReport(
            name=self.name,
            serial=self.serial,
            doing=self._doing,
            since_s=now - self._since,
            moves=self._moves + (worker.state.evaluated if worker is not None else 0),
            failure=None if self.error is None else Failure.of(self.error),
            operation=operation[0] if operation else "",
            operation_s=now - operation[1] if operation else 0.0,
            **(worker.facts() if worker is not None else {}),
        )

    # The work

    def _build(self, task: Assignment) -> int:
        # Imports torch, which processes that only talk to workers do not need.
        from tidemill.cluster.worker.commands import RoleWorker

        self.worker = RoleWorker(task)
        return self.worker.count_parameters()

    def _built(self) -> RoleWorker:
        if self.worker is None:
            raise RuntimeError(f"{self.name} is not built yet")
        return self.worker

    def _run(self) -> None:
        idle = IDLE_S[0]
        while not self._is_stopping:
            if self.run_once() or self._obey(idle):
                idle = IDLE_S[0]
            else:
                idle = min(IDLE_S[1], idle * 1.5)

    def run_once(self) -> bool:
        """Run one command, or poll each open stage once; return whether anything moved."""
        return self._obey(0.0) or self._poll()

    def _obey(self, wait_s: float) -> bool:
        """Carry out the next command, or the first that arrives within `wait_s`."""
        try:
            command, name, done = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
        except queue.Empty:
            return False
        self._now(name)
        try:
            with self._placed(name):
                done.set_result(command())
        except BaseException as error:
            if isinstance(error, InterpreterError):  # a part of this worker is gone: it is of no more use
                self.error = error
            done.set_exception(error)
        self._now("")
        self._say()
        return True

    def _placed(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Put commands that take long on the timeline."""
        if name in ON_TIMELINE and self.worker is not None:
            return self.worker.state.tally.shown(name)
        return contextlib.nullcontext()

    def _poll(self) -> bool:
        worker = self.worker
        if worker is None or worker.is_leaving or self.error is not None:
            return False
        moved, before = False, worker.milestones
        try:
            moved = worker.follow()
            for stage in worker.open:
                self._now(stage)
                moved = worker.poll(stage) or moved
        except BaseException as error:
            if not (worker.is_leaving and isinstance(error, DockError)):
                self.error = error
                if self.has_thread:
                    traceback.print_exc()
        self._now("")
        self._moves += moved
        if self.error is not None or worker.milestones != before:
            self._say()
        return moved

    def _now(self, doing: str) -> None:
        if doing != self._doing:
            self._doing, self._since = doing, time.monotonic()

    def _say(self) -> None:
        with self._changed:
            self.serial += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, where there is one, and release what the work held."""
        self._is_stopping = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def no_terminal(*_: Any, **__: Any) -> None:
    """Refuse breakpoint() in a worker, and in processes that it starts."""
    frame = sys._getframe(1)
    raise TidemillError(
        f"breakpoint() at {frame.f_code.co_filename}:{frame.f_lineno} in {os.environ.get(WORKER, 'a worker')}, "
        "which has no terminal",
        "run the same recipe with cluster.executor=local, where breakpoint() works; or look at a running worker with "
        "`tidemill stacks RUN`",
    )


def own_process(name: str, logs: Path) -> Host:
    """Make a host whose process is a worker and nothing else: its output goes to its own file."""
    keep_logs(name, logs)
    os.environ |= {"PYTHONBREAKPOINT": f"{__name__}.no_terminal", WORKER: name}
    host = Host(name)
    host.start()
    return host


def keep_logs(name: str, logs: Path) -> None:
    """Redirect output to the worker's own file; a signal makes it write its stacks beside it."""
    with contextlib.suppress(OSError):
        logs.mkdir(parents=True, exist_ok=True)
        file = os.open(logs / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)
        stacks = (logs / f"{name}.stacks").open("w")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(file=sys.stderr)
