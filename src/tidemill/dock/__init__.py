"""The dock: the sample flow between workers, without a centre that touches the bytes.

`LocalDock` serves the threads of one process and needs nothing else. `serve` and `connect` are the same across
processes and nodes; they need the packages of the extra `cluster`.
"""

from typing import TYPE_CHECKING, Any

from tidemill.dock.address import Address
from tidemill.dock.api import Dock, DockState, Lease, LeaseExpired, Progress, StageCounts, Want
from tidemill.dock.ledger.counts import Counts, Tallied
from tidemill.dock.local import LocalDock
from tidemill.dock.store.buffer import PackedBuffer
from tidemill.errors import MissingExtra

if TYPE_CHECKING:
    from tidemill.dock.client import RemoteDock, connect
    from tidemill.dock.server import DockNode, DockServer, join, serve
    from tidemill.dock.setup import DockSetup

__all__ = [
    "Address",
    "Counts",
    "Dock",
    "DockNode",
    "DockServer",
    "DockSetup",
    "DockState",
    "Lease",
    "LeaseExpired",
    "LocalDock",
    "PackedBuffer",
    "Progress",
    "RemoteDock",
    "StageCounts",
    "Tallied",
    "Want",
    "connect",
    "join",
    "serve",
]

_ACROSS_PROCESSES = {
    "DockServer": "server",
    "DockSetup": "setup",
    "DockNode": "server",
    "RemoteDock": "client",
    "connect": "client",
    "join": "server",
    "serve": "server",
}


def __getattr__(name: str) -> Any:
    """Load on first use: the in-process dock alone does not need msgspec."""
    if name not in _ACROSS_PROCESSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f"tidemill.dock.{_ACROSS_PROCESSES[name]}")
    except ModuleNotFoundError as error:
        if error.name == "msgspec":
            raise MissingExtra("a dock across processes", error.name, "cluster") from None
        raise
    return getattr(module, name)
