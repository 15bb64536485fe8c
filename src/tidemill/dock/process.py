"""Entry of the dock's own processes: `python -m tidemill.dock.process ledger FOLDER HOST PORT` or `warehouse ...`.

They are given nothing but a folder with the setup and the token, and they stop cleanly when their starter does. They
begin at a line on standard input: a spare that has imported everything stands by, so that a restart takes no second.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from tidemill.dock.setup import DockSetup

SETUP_FILE, TOKEN_FILE = "setup.json", "token"
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    _end_with_parent()
    _allow_many_connections()
    from tidemill.dock import ledger_server, warehouse_server  # the slow part, before the word to begin

    if not sys.stdin.readline():  # a spare whose starter is gone
        return
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    kind, folder, host = arguments[0], Path(arguments[1]), arguments[2]
    setup = DockSetup.from_json((folder / SETUP_FILE).read_text())
    token = (folder / TOKEN_FILE).read_text()
    server: Any
    if kind == "ledger":
        server = ledger_server.LedgerServer(setup, folder / "ledger", token, host, int(arguments[3]))
    else:
        name, ledger = arguments[3], arguments[4]
        server = warehouse_server.WarehouseServer(setup, name, folder / name, token, host, ledger)

    def stop(*_: object) -> None:
        server.is_stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter decides, not the terminal
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.run()


def _allow_many_connections() -> None:
    """One file each for every thread of every worker, and for every segment."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
