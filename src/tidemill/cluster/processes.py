"""Workers as plain processes of this machine, forked from one that has imported everything: a start takes no second."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tidemill.cluster.handle import WorkerLost
from tidemill.cluster.placement import Placement, Post, Resources
from tidemill.cluster.report import Answer, Numbers
from tidemill.cluster.role import Host
from tidemill.device import host as machine
from tidemill.dock.address import Address

PRELOAD = ["tidemill.cluster.orders", "tidemill.cluster.processes"]


class ProcessStarter:
    home = ("node0", "127.0.0.1")

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)

    def nodes(self) -> Sequence[Resources]:
        return [{"CPU": float(max(64, machine.cores()))}]  # processes of one machine share its cores as they can

    def reserve(self, placement: Placement) -> None: ...

    def spawn(self, post: Post, logs: Path) -> ProcessHandle:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(post.name, str(logs), theirs), name=post.name, daemon=True)
        with main_left_alone():
            process.start()
        theirs.close()
        return ProcessHandle(post.name, process, ours)

    def release(self, post: Post) -> None: ...

    def store(self, node: str, host: str, dock: Address, memory_mb: int | None) -> bool:
        return False  # the dock's own process on this machine

    def lost_stores(self) -> list[str]:
        return []

    def describe(self) -> str:
        return "processes of this machine"

    def close(self) -> None: ...


@contextlib.contextmanager
def main_left_alone() -> Iterator[None]:
    """A worker needs nothing of the caller's own script, which may be a notebook, standard input, or without a guard
    against being run again: it is not imported there."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__dict__["__spec__"] = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


class ProcessHandle:
    def __init__(self, name: str, process: Any, pipe: Connection) -> None:
        self.name, self._process, self._pipe = name, process, pipe
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._orders = Numbers()
        self._lock = threading.Lock()
        self._is_gone = False
        threading.Thread(target=self._listen, name=f"hear-{name}", daemon=True).start()

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            try:
                if self._is_gone:
                    raise BrokenPipeError
                self._pipe.send((number, method, args, self._orders.of(method)))
            except OSError:
                self._waiting.pop(number, None)
                future.set_exception(WorkerLost(self._why()))
        return future

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def _listen(self) -> None:
        while True:
            try:
                number, answer = self._pipe.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                future = self._waiting.pop(number, None)
            if future is not None:
                future.set_result(answer)
        with self._lock:
            self._is_gone = True
            waiting, self._waiting = list(self._waiting.values()), {}
        self._process.join(1.0)
        for future in waiting:
            future.set_exception(WorkerLost(self._why()))

    def _why(self) -> str:
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}" if code is not None else "closed its connection"


def serve(name: str, logs: str, pipe: Connection) -> None:
    """A worker's process: every message is answered by a thread of its own; it ends when the driver does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides, not the terminal
    host = Host(name, logs)
    sending = threading.Lock()

    def respond(number: int, method: str, args: tuple[Any, ...], order: int) -> None:
        answer: Answer = host.answer(method, args, order)
        with sending, contextlib.suppress(OSError):
            pipe.send((number, answer))

    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        threading.Thread(target=respond, args=message, daemon=True).start()
