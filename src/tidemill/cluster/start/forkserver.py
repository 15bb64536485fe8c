"""Forks workers from one process of their node that has imported everything: seconds of imports, paid once. That
process listens on a Unix socket. The process that connects and requests a worker stays connected to it: the connection
carries commands and answers, and is the worker's lifeline. A worker ends with the process that requested it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import itertools
import multiprocessing
import os
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tidemill import owned
from tidemill.cluster.commands import Request
from tidemill.cluster.report import Answer, Numbers
from tidemill.cluster.start.handle import WorkerLost
from tidemill.cluster.worker.host import own_process
from tidemill.device import BEFORE_FORK, after_fork
from tidemill.errors import TidemillError

PRELOAD = ("tidemill.cluster.worker.commands",)  # imports torch, transformers and everything that works
BOUND_S = 60.0  # for a new process to listen, which it does before it imports
PAUSE_S = 0.01
PEER = struct.Struct("3i")  # process, user and group, as the kernel reports them
TAIL = 1500  # last characters of its log, which say why it ended


class Forks:
    """This node's fork server, at a path in a folder of its own. Several processes may use it; the first that needs
    it starts it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: int | None = None

    def start(self) -> None:
        """Start it without waiting: its imports run while the caller continues."""
        make_private(self.path.parent)
        if self._owner is None:
            self._owner = owned.own(self.path.parent)
        code = f"from tidemill.cluster.start.forkserver import listen; listen({str(self.path)!r})"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,  # held open for as long as this process lives: its end is seen there
                stdout=log,
                stderr=log,
                env=os.environ | environment() | BEFORE_FORK,
            )

    @property
    def _log(self) -> Path:
        return self.path.with_suffix(".log")

    def spawn(self, name: str, logs: Path, variables: Mapping[str, str] = MappingProxyType({})) -> ForkedHandle:
        """Fork a worker. `variables`: added to this process's environment."""
        connection = self._connect()
        connection.send(("fork", name, str(logs), {**os.environ, **variables}))
        return ForkedHandle(name, connection, self)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker that has ended; None when it is not known."""
        with contextlib.suppress(OSError, EOFError):
            connection = _connected(self.path)
            connection.send(("ended", pid))
            code: int | None = connection.recv()
            return code
        return None

    def _connect(self) -> Connection:
        with contextlib.suppress(OSError):
            return _connected(self.path)
        make_private(self.path.parent)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # only one process starts it
            deadline = time.monotonic() + BOUND_S
            while True:
                with contextlib.suppress(OSError):
                    return _connected(self.path)
                if self._process is None:
                    self.start()
                elif self._process.poll() is not None or time.monotonic() > deadline:
                    self._process = None
                    raise TidemillError(f"no workers can be started: {self.words()}", f"its log is {self._log}")
                time.sleep(PAUSE_S)

    def words(self) -> str:
        """Return the end of its log."""
        text = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        return text[-TAIL:] or "the fork server ended at once"

    def close(self) -> None:
        """End the process if it was started here, and remove the folder."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.path.parent, ignore_errors=True)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


class ForkedHandle:
    """A forked worker, from the side that requested it."""

    def __init__(self, name: str, pipe: Connection, forks: Forks) -> None:
        self.name, self._pipe, self._forks = name, pipe, forks
        self.pid = 0  # not known yet
        self._waiting: dict[int, Future[Any]] = {}
        self._messages = itertools.count()
        self._commands = Numbers()
        self._lock = threading.Lock()
        self._is_gone = False
        threading.Thread(target=self._listen, name=f"hear-{name}", daemon=True).start()

    def call(self, request: Request[Any]) -> Future[Any]:
        return self.pass_on(request, self._commands.next(request.is_direct))

    def pass_on(self, request: Request[Any], order: int) -> Future[Any]:
        """Send a request that was numbered elsewhere."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._messages)
            self._waiting[number] = future
            try:
                if self._is_gone:
                    raise BrokenPipeError
                self._pipe.send((number, request, order))
            except OSError:
                self._waiting.pop(number, None)
                future.set_exception(WorkerLost(self._why()))
        return future

    def kill(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        """Cut the lifeline, which ends the worker or what was to become one."""
        with contextlib.suppress(OSError):
            socket.socket(fileno=os.dup(self._pipe.fileno())).shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            self.pid = self._pipe.recv()
            while True:
                number, answer = self._pipe.recv()
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is not None:
                    future.set_result(answer)
        with self._lock:
            self._is_gone = True
            waiting, self._waiting = list(self._waiting.values()), {}
        why = self._why() if waiting else ""
        for future in waiting:
            future.set_exception(WorkerLost(why))

    def _why(self) -> str:
        if not self.pid:
            return f"could not be started: {self._forks.words()}"
        code = self._forks.exit_code(self.pid)
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}" if code is not None else "closed its connection"


def environment() -> dict[str, str]:
    """Return variables that workers inherit from the driver: the code's path, and threads of numeric libraries."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("TIDEMILL_", "OMP_", "TORCH_"))}
    return {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "OMP_NUM_THREADS": "1"} | kept


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter. An existing one is refused if another user owns it or can enter."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or stat.S_IMODE(seen.st_mode) & 0o077:
        raise TidemillError(
            f"{folder} is not this user's alone (owner {seen.st_uid}, mode {stat.filemode(seen.st_mode)})",
            "another user may have put it there: remove it",
        )


def _connected(path: Path) -> Connection:
    door = socket.socket(socket.AF_UNIX)
    try:
        door.connect(str(path))
        if not _is_own(door):
            raise PermissionError(f"another user answers at {path}")
    except OSError:
        door.close()
        raise
    return Connection(door.detach())


def _is_own(connection: socket.socket) -> bool:
    """Say whether a process of this user is at the other end, because what comes from there is unpickled."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    return int(PEER.unpack(told)[1]) == os.geteuid()


# In the process that workers are forked from


def listen(path: str) -> None:
    """Serve at `path` for as long as the process that started this one lives. Clients that connect during the
    imports wait."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides, not the terminal
    door = _bound(path)
    if door is None:
        return  # another one answers there
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the garbage collector leaves existing objects alone, so that their pages stay shared
    Parent(door).run()


def _bound(path: str) -> socket.socket | None:
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind(path)
    except OSError:
        with contextlib.suppress(OSError):
            _connected(Path(path)).close()
            return None
        os.unlink(path)  # left behind by a killed one
        door.bind(path)
    door.listen(256)
    return door


class Parent:
    """Forks workers, and kills those whose lifeline is cut, in case they hang and cannot see it themselves."""

    def __init__(self, door: socket.socket) -> None:
        self.door = door
        self.lines: dict[int, Connection] = {}  # by worker
        self.codes: dict[int, int] = {}  # of workers that have ended
        self._poll = select.poll()
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        for file in (door.fileno(), sys.stdin.fileno(), self._woken):
            self._poll.register(file, select.POLLIN)

    def run(self) -> None:
        while True:
            for file, _ in self._poll.poll():
                self._look(file)
            self._reap()

    def _look(self, file: int) -> None:
        if file == self.door.fileno():
            answer, _ = self.door.accept()
            if _is_own(answer):
                self._answer(Connection(answer.detach()))
            else:
                answer.close()
        elif file == self._woken:
            os.read(file, 4096)
        elif file == sys.stdin.fileno():
            if not os.read(file, 1):
                os._exit(0)
        else:
            self._poll.unregister(file)
            for pid in [pid for pid, line in self.lines.items() if line.fileno() == file]:
                os.kill(pid, signal.SIGKILL)

    def _answer(self, connection: Connection) -> None:
        try:
            what, *said = connection.recv()
            if what == "ended":
                self._reap()
                connection.send(self.codes.get(said[0]))
                return
        except (EOFError, OSError):
            return  # the client went away
        pid = os.fork()
        if pid:
            self.lines[pid] = connection
            self._poll.register(connection, select.POLLRDHUP)
            return
        try:
            self._forget()
            _become_worker(connection, *said)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                self.codes[pid] = os.waitstatus_to_exitcode(status)
                line = self.lines.pop(pid)
                with contextlib.suppress(KeyError):
                    self._poll.unregister(line)
                line.close()  # the process that requested the worker sees its end

    def _forget(self) -> None:
        """In a forked worker, close everything that belongs to other workers."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.door.close()
        os.close(self._woken)
        for line in self.lines.values():
            line.close()


def _become_worker(connection: Connection, name: str, logs: str, variables: dict[str, str]) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.clear()
    os.environ.update(variables)
    after_fork()
    connection.send(os.getpid())
    multiprocessing.current_process().name = name  # the name that the worker's own code and logs see
    serve(name, logs, connection)


def serve(name: str, logs: str, pipe: Connection) -> None:
    """Run a worker's process: each message is answered by a thread of its own; it ends with its lifeline."""
    host = own_process(name, Path(logs))
    sending = threading.Lock()

    def respond(number: int, request: Request[Any], order: int) -> None:
        answer: Answer = host.answer(request, order)
        with sending, contextlib.suppress(OSError):
            pipe.send((number, answer))

    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        threading.Thread(target=respond, args=message, daemon=True).start()
