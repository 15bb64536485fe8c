"""Workers forked from one process of their node that has imported everything: seconds of imports, done once.

That process listens at a path. Who connects and asks for a worker stays connected to it: the connection carries what
the worker is told and answers, and is its life line. A worker ends with whoever asked for it.
"""

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

from tidemill.cluster.commands import Request
from tidemill.cluster.report import Answer, Numbers
from tidemill.cluster.start import owned
from tidemill.cluster.start.handle import WorkerLost
from tidemill.cluster.worker.host import own_process
from tidemill.device import BEFORE_FORK
from tidemill.errors import TidemillError

PRELOAD = ("tidemill.cluster.worker.commands",)  # brings torch, transformers and all of the work
BOUND_S = 60.0  # for a new process to listen, which it does before it imports
PAUSE_S = 0.01
PEER = struct.Struct("3i")  # process, user and group, as the kernel tells them
TAIL = 1500  # characters of its log that tell why it ended


class Forks:
    """Where workers of this node are forked: at a path in a folder of its own. Several may know of it; the first that
    needs it starts it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: int | None = None

    def start(self) -> None:
        """Without waiting: its imports go on beside whatever the caller does next."""
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
        """`variables`: of its environment, beside this process's."""
        connection = self._connect()
        connection.send(("fork", name, str(logs), {**os.environ, **variables}))
        return ForkedHandle(name, connection, self)

    def exit_code(self, pid: int) -> int | None:
        """Of a worker that has ended; None when that is not known."""
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
            fcntl.flock(lock, fcntl.LOCK_EX)  # one of several starts it
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
        """What it said last."""
        text = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        return text[-TAIL:] or "the process they come from ended at once"

    def close(self) -> None:
        """End what was started here, and clear the folder away."""
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
    """A worker that was forked here, as whoever asked for it sees it."""

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
        """What somebody else has numbered."""
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
        """The worker, or what was to become one, ends when it hears of it."""
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
    """What workers take over from the driver: where the code is, and how many threads numeric libraries start."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("TIDEMILL_", "OMP_", "TORCH_"))}
    return {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "OMP_NUM_THREADS": "1"} | kept


def make_private(folder: Path) -> None:
    """A folder that only this user can enter. One that is there already is not taken from another user's hand."""
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
    """Whether a process of this user is at the other end: what comes from there is unpickled."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    return int(PEER.unpack(told)[1]) == os.geteuid()


# In the process that workers are forked from


def listen(path: str) -> None:
    """Answer at `path` for as long as whoever started this process lives. Who comes before the imports waits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides, not the terminal
    door = _bound(path)
    if door is None:
        return  # another one answers there
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is there already is not looked at again, so that its pages stay shared
    Parent(door).run()


def _bound(path: str) -> socket.socket | None:
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind(path)
    except OSError:
        with contextlib.suppress(OSError):
            _connected(Path(path)).close()
            return None
        os.unlink(path)  # left by one that was killed
        door.bind(path)
    door.listen(256)
    return door


class Parent:
    """Forks workers, and ends those whose life line is cut, also if they hang and cannot see it themselves."""

    def __init__(self, door: socket.socket) -> None:
        self.door = door
        self.lines: dict[int, Connection] = {}  # by worker
        self.codes: dict[int, int] = {}  # of those that have ended
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
            return  # it went away
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
                line.close()  # whoever asked for the worker hears of its end

    def _forget(self) -> None:
        """In a worker: nothing of the other workers is held here."""
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
    connection.send(os.getpid())
    multiprocessing.current_process().name = name  # what a worker's own code, and its logs, know it by
    serve(name, logs, connection)


def serve(name: str, logs: str, pipe: Connection) -> None:
    """A worker's process: every message is answered by a thread of its own; it ends when its life line does."""
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
