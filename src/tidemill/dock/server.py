"""DockServer: starts a dock's processes on this machine, watches them, and restarts those that die."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidemill.dock.address import Address
from tidemill.dock.client import RemoteDock
from tidemill.dock.net import messages as m
from tidemill.dock.net.caller import Caller
from tidemill.dock.net.process import LEDGER_FOLDER, SETUP_FILE, TOKEN_FILE
from tidemill.dock.net.wire import SOCKET_FILE, address_of, check_host, listen, listen_locally
from tidemill.dock.setup import DockSetup
from tidemill.dock.store import arena
from tidemill.errors import DockError
from tidemill.graph import Stage

log = logging.getLogger("tidemill.dock")

START_S = 60.0
STOP_S = 5.0
FAILED_STARTS = 5  # given up after this many in a row that end before they are ready


class Keeper:
    """One of the dock's processes (see process.py), which is listened to and restarted if it ends altogether. The
    thread that starts it also listens to it: the kernel stops the process when that thread ends."""

    def __init__(
        self, name: str, command: list[str], log: Path, on_death: Callable[[], None], files: tuple[int, ...] = ()
    ) -> None:
        """`files`: open files that the process inherits."""
        self.name = name
        self.restarts = 0
        self.error: str | None = None
        self._command, self._log, self._on_death, self._files = command, log, on_death, files
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0
        self._is_up, self._ready = threading.Event(), threading.Event()
        self._failed = 0  # starts in a row
        self._is_stopping = False
        self._thread = threading.Thread(target=self._keep, daemon=True, name=f"keep-{name}")
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process id of the server itself; of the next one, when one has just ended."""
        if not self._is_up.wait(START_S):
            raise DockError(f"the dock's {self.name} is not running", f"look at {self._log}")
        return self._pid

    def wait_ready(self) -> None:
        if not self._ready.wait(START_S) or self.error:
            tail = self._log.read_text()[-500:] if self._log.exists() else ""
            raise DockError(f"the dock's {self.name} does not start: {self.error or 'no sign of life'}", tail)

    def stop(self) -> None:
        self._is_stopping = True
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join(STOP_S)

    def _keep(self) -> None:
        while not self._is_stopping and self.error is None:
            process = self._process = self._spawn()
            if self._is_stopping:  # told to stop before there was anything to stop
                process.terminate()
            assert process.stdout is not None
            words: list[str] = []
            with process.stdout:
                for line in process.stdout:
                    words = line.split()
                    self._hear(words)
            process.wait()
            self._is_up.clear()
            if words != ["ended"]:  # else its end was noted already
                self._note_end()

    def _hear(self, words: list[str]) -> None:
        match words:
            case ["began", pid]:
                self._pid = int(pid)
                self._is_up.set()
            case ["ready"]:
                self._failed = 0
                self._ready.set()
            case ["ended"]:
                self._is_up.clear()
                self._note_end()

    def _note_end(self) -> None:
        if self._is_stopping or self.error is not None:
            return
        self._failed += 1
        if self._failed >= FAILED_STARTS:
            self.error = f"it ended {self._failed} times before it was ready"
            self._ready.set()
            assert self._process is not None
            self._process.terminate()
            return
        self.restarts += 1
        # in a thread, because it may ask the ledger, which may be the one being restarted
        threading.Thread(target=self._on_death, daemon=True, name=f"death-of-{self.name}").start()

    def _spawn(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
        }  # no matrices are multiplied there, and threads do not survive a fork
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                pass_fds=self._files,
            )


class DockServer:
    """A whole dock on this machine: a ledger and one warehouse per name in `nodes` (usually one; more simulate
    several machines)."""

    def __init__(
        self,
        setup: DockSetup,
        folder: Path | str | None = None,
        host: str = "127.0.0.1",
        nodes: Sequence[str] = ("node0",),
    ) -> None:
        self._host = check_host(host)
        self.folder = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="tidemill-dock-"))
        self._is_own_folder = folder is None
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        token = _token(self.folder / TOKEN_FILE)
        (self.folder / SETUP_FILE).write_text(setup.to_json())
        if (self.folder / LEDGER_FOLDER).exists():
            log.warning(
                "%s holds an earlier dock, which continues: ids that it has seen are not added again; for a new dock, "
                "use a new folder",
                self.folder,
            )
        # held open here, so that the restarted ledger has the same address and nobody else can take it
        self._listeners = listen(host), listen_locally(self.folder)
        self.address = Address(address_of(self._listeners[0]), token, str(self.folder.absolute() / SOCKET_FILE))
        self.address.save(self.folder)
        self._lock = threading.Lock()
        self._caller = Caller(token, self.address.ledger, self.address.local)
        files = tuple(listener.fileno() for listener in self._listeners)
        command = self._command("ledger", ",".join(map(str, files)))
        self.ledger = Keeper("ledger", command, self.folder / "ledger.log", lambda: None, files)
        self.warehouses: dict[str, Keeper] = {}
        self._arenas: dict[str, m.Announce] = {}
        try:
            for name in nodes:
                self.add_warehouse(name)
            self.ledger.wait_ready()
            for name in nodes:
                self.warehouses[name].wait_ready()
                self.wait_announced(name)
        except BaseException:
            self.close()
            raise

    def add_warehouse(self, name: str) -> None:
        check_name(name)
        log = self.folder / f"{name}.log"
        command = self._command("warehouse", name, self.address.ledger)
        self.warehouses[name] = Keeper(name, command, log, lambda: self._warehouse_died(name))

    def wait_announced(self, name: str) -> m.Announce:
        """Wait until the ledger knows the warehouse of this name."""
        self._arenas[name] = _wait_announced(self._ask, name, self.folder / f"{name}.log")
        return self._arenas[name]

    def find(self, name: str) -> int | None:
        """Return the key of the warehouse of this name, if the ledger knows one now."""
        for hello in self._ask(m.AskSetup()).warehouses:
            if hello.node == name:
                self._arenas[name] = hello
                return int(hello.warehouse)
        return None

    def connect(self, node: str | None = None) -> RemoteDock:
        return RemoteDock(self.address, node)

    def lose(self, name: str) -> None:
        """Report that a warehouse's machine is gone with its bytes, instead of waiting until its silence shows it."""
        key = self.find(name)
        if key is not None:
            self._ask(m.Lost(key))

    def close(self) -> None:
        for keeper in self.warehouses.values():
            keeper.stop()
        self.ledger.stop()
        self._caller.close()
        for listener in self._listeners:
            listener.close()
        (self.folder / SOCKET_FILE).unlink(missing_ok=True)
        for hello in self._arenas.values():
            shutil.rmtree(hello.arena, ignore_errors=True)
        if self._is_own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> DockServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warehouse_died(self, name: str) -> None:
        _tell_if_lost(self._ask, self._arenas.get(name))

    def _ask(self, message: m.Message) -> Any:
        with self._lock:
            return self._caller.ask(message, within_s=START_S)

    def _command(self, kind: str, *rest: str) -> list[str]:
        return _command(kind, self.folder, self._host, *rest)


class DockNode:
    """Another machine of a dock that runs elsewhere: its warehouse, watched from here and restarted when it dies."""

    def __init__(self, address: Address, name: str, host: str, folder: Path | str | None = None, **memory: Any) -> None:
        """`memory`: memory_bytes, spill_bytes, segment_bytes of DockSetup."""
        self.address, self.name = address, check_name(name)
        self._is_own_folder = folder is None
        self.folder = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="tidemill-dock-"))
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / SETUP_FILE).write_text(DockSetup(stages=(), **memory).to_json())
        _token(self.folder / TOKEN_FILE, address.token)
        self._lock = threading.Lock()
        self._caller = Caller(address.token, address.ledger, address.local)
        self._hello: m.Announce | None = None
        command = _command("warehouse", self.folder, check_host(host), name, address.ledger)
        log = self.folder / f"{name}.log"
        self.warehouse = Keeper(name, command, log, lambda: _tell_if_lost(self._ask, self._hello))
        try:
            self.warehouse.wait_ready()
            self._hello = _wait_announced(self._ask, name, log)
        except BaseException:
            self.close()
            raise

    def connect(self) -> RemoteDock:
        return RemoteDock(self.address, self.name)

    def close(self) -> None:
        """Stop the warehouse. Its bytes are gone; the ledger is told."""
        self.warehouse.stop()
        self._caller.close()
        if self._is_own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, message: m.Message) -> Any:
        with self._lock:
            return self._caller.ask(message, within_s=START_S)


def serve(
    stages: Sequence[Stage], folder: Path | str | None = None, host: str = "127.0.0.1", **settings: Any
) -> DockServer:
    """Start a dock for these stages on this machine; `settings`: those of DockSetup."""
    return DockServer(DockSetup(stages=tuple(stages), **settings), folder, host)


def join(address: Address | str | Path, name: str, host: str, **settings: Any) -> DockNode:
    """Let this machine take part in a dock: workers here write to and read from its memory."""
    return DockNode(address if isinstance(address, Address) else Address.find(address), name, host, **settings)


def check_name(name: str) -> str:
    """Check a node's name, which is part of the names of files and folders."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name == "ledger":
        raise DockError(f"{name!r} cannot be the name of a node", "use letters, digits, '.', '_' and '-'; not 'ledger'")
    return name


def _wait_announced(ask: Callable[[m.Message], Any], name: str, log: Path) -> m.Announce:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for hello in ask(m.AskSetup()).warehouses:
            if hello.node == name and Path(hello.arena).is_dir():
                return hello  # type: ignore[no-any-return]
        time.sleep(0.01)
    raise DockError(f"warehouse {name!r} has not reached the ledger", f"look at {log}")


def _tell_if_lost(ask: Callable[[m.Message], Any], hello: m.Announce | None) -> None:
    """Tell the ledger at once if a warehouse's bytes did not outlive its process."""
    if hello is not None and not Path(hello.arena).is_dir():
        with suppress(
            DockError, TimeoutError
        ):  # this dock is being closed; or the ledger is down, and will notice by itself
            ask(m.Lost(hello.warehouse))


def _command(kind: str, folder: Path, host: str, *rest: str) -> list[str]:
    return [sys.executable, "-m", "tidemill.dock.net.process", str(os.getpid()), kind, str(folder), host, *rest]


def remove_dock(folder: Path) -> list[Path]:
    """Remove what a dock left whose processes were all killed: its folder, and its shared memory on this machine.
    Memory that a warehouse still holds is left alone."""
    removed = []
    with suppress(FileNotFoundError):
        name = arena.dock_name((folder / TOKEN_FILE).read_text())
        removed = arena.remove_orphans(Path("/dev/shm"), name, older_than_s=-1.0)
    shutil.rmtree(folder, ignore_errors=True)
    return removed


def _token(path: Path, token: str | None = None) -> str:
    if not path.exists():
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(token or secrets.token_hex(32))
    return path.read_text()
