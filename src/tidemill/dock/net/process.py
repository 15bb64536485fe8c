"""Entry of the dock's own processes: `python -m tidemill.dock.net.process STARTER ledger FOLDER HOST LISTENERS` or
`STARTER warehouse ...`. STARTER is the process that starts it; LISTENERS are file descriptors of listening sockets that
it hands down, so that nobody can take a dead ledger's place before the next one is up. The processes get only a folder
with the setup and the token, and stop cleanly when their starter does. The started process imports everything once and
then only forks: the server works in a child, and when that ends the next child is up in milliseconds, however busy the
machine. To its starter it writes, a line each: `began PID`, `ready`, `ended`."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from tidemill.dock.setup import DockSetup

SETUP_FILE, TOKEN_FILE, LEDGER_FOLDER = "setup.json", "token", "ledger"
SHORT_LIFE_S, PAUSE_S = 0.5, 0.02  # a child that ends this soon is not replaced at once: the next may end, too
_PR_SET_PDEATHSIG = 1


def main(starter: int, arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter decides, not the terminal
    _end_with_parent(signal.SIGTERM)
    if os.getppid() != starter:  # it ended before the kernel was asked to end us with it
        return
    _allow_many_connections()
    from tidemill.dock.net import (
        ledger_server,
        warehouse_server,  # the slow part
    )

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    gc.freeze()  # children share these pages as long as they are not written
    keep_alive(lambda: serve(arguments, ledger_server, warehouse_server))


def keep_alive(work: Callable[[], None]) -> None:
    """Run `work` in a child, and in another whenever one ends, until told to stop."""
    child, is_stopping = 0, False

    def stop(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        if child:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    while True:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # so that a signal finds a child, or none is made
        if is_stopping:
            return
        began = time.monotonic()
        child = _fork(work)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        say(f"began {child}")
        os.waitpid(child, 0)
        child = 0
        say("ended")
        if time.monotonic() - began < SHORT_LIFE_S:
            time.sleep(PAUSE_S)


def _fork(work: Callable[[], None]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _end_with_parent(signal.SIGKILL)  # without saying goodbye, with which a warehouse would discard its bytes
        if os.getppid() == parent:
            work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def serve(arguments: list[str], ledger_server: ModuleType, warehouse_server: ModuleType) -> None:
    kind, folder, host = arguments[0], Path(arguments[1]), arguments[2]
    setup = DockSetup.from_json((folder / SETUP_FILE).read_text())
    token = (folder / TOKEN_FILE).read_text()
    server: Any
    if kind == "ledger":
        listeners = [socket.socket(fileno=int(file)) for file in arguments[3].split(",")]
        server = ledger_server.LedgerServer(setup, folder / LEDGER_FOLDER, token, listeners)
    else:
        name, ledger = arguments[3], arguments[4]
        server = warehouse_server.WarehouseServer(setup, name, folder / name, token, host, ledger)

    def stop(*_: object) -> None:
        server.is_stopping = True

    signal.signal(signal.SIGTERM, stop)
    say("ready")
    server.run()


def say(word: str) -> None:
    with suppress(BrokenPipeError):  # the starter has gone: the signal to stop is on its way
        os.write(sys.stdout.fileno(), f"{word}\n".encode())


def _allow_many_connections() -> None:
    """Raise the limit of open files: one for every thread of every worker, and for every segment."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_with_parent(how: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
