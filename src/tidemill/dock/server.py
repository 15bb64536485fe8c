"""DockServer: starts a dock's processes on this machine, watches them, and starts those again that die."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidemill.dock import messages as m
from tidemill.dock.address import Address
from tidemill.dock.client import RemoteDock
from tidemill.dock.process import SETUP_FILE, TOKEN_FILE
from tidemill.dock.setup import DockSetup
from tidemill.dock.wire import Caller, check_host
from tidemill.errors import DockError
from tidemill.graph import Stage

START_S = 60.0
STOP_S = 5.0
FAILED_STARTS = 5  # so many in a row that end before the process is ready are given up


class Keeper:
    """One process, and a spare beside it that takes over when it ends. The thread that starts them also waits for
    them: the kernel tells them to stop when that thread ends."""

    def __init__(self, name: str, command: list[str], log: Path, on_death: Callable[[], None]) -> None:
        self.name = name
        self.restarts = 0
        self.error: str | None = None
        self._command, self._log, self._on_death = command, log, on_death
        self._process: subprocess.Popen[str] | None = None
        self._spare: subprocess.Popen[str] | None = None
        self._ready = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._keep, daemon=True, name=f"keep-{name}")
        self._thread.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait_ready(self) -> None:
        if not self._ready.wait(START_S) or self.error:
            tail = self._log.read_text()[-500:] if self._log.exists() else ""
            raise DockError(f"the dock's {self.name} does not start: {self.error or 'no sign of life'}", tail)

    def stop(self) -> None:
        self._is_stopping = True
        for process in (self._spare, self._process):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        self._thread.join(STOP_S)

    def _keep(self) -> None:
        failed = 0
        while not self._is_stopping:
            process = self._process = self._spare or self._spawn()
            self._spare = None
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # it died before its turn; the loop tries the next
                process.stdin.write("begin\n")
                process.stdin.flush()
            failed += 1
            if process.stdout.readline() == "ready\n":
                failed = 0
                self._ready.set()
                self._spare = self._spawn()
            process.wait()
            if self._is_stopping:
                return
            if failed >= FAILED_STARTS:
                self.error = f"it ended {failed} times before it was ready"
                self._ready.set()
                return
            self.restarts += 1
            self._on_death()

    def _spawn(self) -> subprocess.Popen[str]:
        with open(self._log, "ab") as log:
            return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)


class DockServer:
    """A whole dock on this machine: a ledger and one warehouse per name in `nodes` (one is usual; more show, on one
    machine, what several do)."""

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
        self._port = _free_port(host)
        self.address = Address(f"tcp://{host}:{self._port}", token)
        self.address.save(self.folder)
        self._lock = threading.Lock()
        self._caller = Caller(token, self.address.ledger)
        command = self._command("ledger", str(self._port))
        self.ledger = Keeper("ledger", command, self.folder / "ledger.log", lambda: None)
        self.warehouses: dict[str, Keeper] = {}
        self._arenas: dict[str, m.Announce] = {}
        for name in nodes:
            self.add_warehouse(name)
        self.ledger.wait_ready()
        for name in nodes:
            self.warehouses[name].wait_ready()
            self.wait_announced(name)

    def add_warehouse(self, name: str) -> None:
        log = self.folder / f"{name}.log"
        command = self._command("warehouse", name, self.address.ledger)
        self.warehouses[name] = Keeper(name, command, log, lambda: self._warehouse_died(name))

    def wait_announced(self, name: str) -> m.Announce:
        """Until the ledger knows the warehouse of this name."""
        self._arenas[name] = _wait_announced(self._ask, name, self.folder / f"{name}.log")
        return self._arenas[name]

    def find(self, name: str) -> int | None:
        """The key of the warehouse of this name, if the ledger knows one now."""
        for hello in self._ask(m.AskSetup()).warehouses:
            if hello.node == name:
                self._arenas[name] = hello
                return int(hello.warehouse)
        return None

    def connect(self, node: str | None = None) -> RemoteDock:
        return RemoteDock(self.address, node)

    def lose(self, name: str) -> None:
        """The machine of this warehouse is gone, its bytes with it: do not wait for its silence to tell."""
        key = self.find(name)
        if key is not None:
            self._ask(m.Lost(key))

    def close(self) -> None:
        for keeper in self.warehouses.values():
            keeper.stop()
        self.ledger.stop()
        with self._lock:
            self._caller.close()
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
    """One more machine of a dock that runs elsewhere: its warehouse, watched from here and started again when it
    dies."""

    def __init__(self, address: Address, name: str, host: str, folder: Path | str | None = None, **memory: Any) -> None:
        """`memory`: memory_bytes, spill_bytes, segment_bytes of DockSetup."""
        self.address, self.name = address, name
        self._is_own_folder = folder is None
        self.folder = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="tidemill-dock-"))
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / SETUP_FILE).write_text(DockSetup(stages=(), **memory).to_json())
        _token(self.folder / TOKEN_FILE, address.token)
        self._lock = threading.Lock()
        self._caller = Caller(address.token, address.ledger)
        self._hello: m.Announce | None = None
        command = _command("warehouse", self.folder, check_host(host), name, address.ledger)
        log = self.folder / f"{name}.log"
        self.warehouse = Keeper(name, command, log, lambda: _tell_if_lost(self._ask, self._hello))
        self.warehouse.wait_ready()
        self._hello = _wait_announced(self._ask, name, log)

    def connect(self) -> RemoteDock:
        return RemoteDock(self.address, self.name)

    def close(self) -> None:
        """Its bytes go with it; the ledger is told."""
        self.warehouse.stop()
        with self._lock:
            self._caller.close()
        if self._is_own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, message: m.Message) -> Any:
        with self._lock:
            return self._caller.ask(message, within_s=START_S)


def serve(
    stages: Sequence[Stage], folder: Path | str | None = None, host: str = "127.0.0.1", **settings: Any
) -> DockServer:
    """Start a dock for these stages on this machine; `settings` are DockSetup's."""
    return DockServer(DockSetup(stages=tuple(stages), **settings), folder, host)


def join(address: Address | str | Path, name: str, host: str, **settings: Any) -> DockNode:
    """Let this machine take part in a dock: workers here write to and read from its own memory."""
    return DockNode(address if isinstance(address, Address) else Address.find(address), name, host, **settings)


def _wait_announced(ask: Callable[[m.Message], Any], name: str, log: Path) -> m.Announce:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for hello in ask(m.AskSetup()).warehouses:
            if hello.node == name and Path(hello.arena).is_dir():
                return hello  # type: ignore[no-any-return]
        time.sleep(0.01)
    raise DockError(f"warehouse {name!r} has not reached the ledger", f"look at {log}")


def _tell_if_lost(ask: Callable[[m.Message], Any], hello: m.Announce | None) -> None:
    """A warehouse's bytes outlive its process. When they went too, the ledger must know at once."""
    if hello is not None and not Path(hello.arena).is_dir():
        ask(m.Lost(hello.warehouse))


def _command(kind: str, folder: Path, host: str, *rest: str) -> list[str]:
    return [sys.executable, "-m", "tidemill.dock.process", kind, str(folder), host, *rest]


def _token(path: Path, token: str | None = None) -> str:
    if not path.exists():
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(token or secrets.token_hex(32))
    return path.read_text()


def _free_port(host: str) -> int:
    """The ledger comes back on the same port, so the port is chosen before the ledger is."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])
