"""What the driver hands out: an assignment makes a process a worker, a link joins learners and rollout workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tidemill.cluster.report import StoreAddress
from tidemill.cluster.wiring import Post
from tidemill.dock import Dock
from tidemill.dock.address import Address
from tidemill.flow.records import Activity
from tidemill.recipe.config import Config
from tidemill.reshard.layout import Layout
from tidemill.reshard.move import Verify

if TYPE_CHECKING:
    from tidemill.cluster.worker.weights import Sources
    from tidemill.flow.dump import Dump


@dataclass(frozen=True, slots=True)
class DockDoor:
    """A worker's way into the dock, whose leases are renewed while it works."""

    dock: Dock
    leave: Callable[[], None]  # wakes whoever waits there: for a dock that is about to end
    leases: Callable[[], int] = lambda: 0  # how many are held


class DockPlace(Protocol):
    """Where a run's dock is."""

    @property
    def ledger(self) -> str:
        """Names the dock: what was counted at another does not count here."""

    def connect(self, node: str) -> DockDoor: ...


@dataclass(frozen=True, slots=True)
class ServedDock:
    """Implements `DockPlace` for a dock of processes of its own."""

    address: Address

    @property
    def ledger(self) -> str:
        return self.address.ledger

    def connect(self, node: str) -> DockDoor:
        from tidemill.dock.client import RemoteDock

        dock = RemoteDock(self.address, node, renews=True)
        return DockDoor(dock, dock.leave, lambda: dock.leases)


def _never() -> bool:
    return False


def _to_nobody(activity: Activity) -> None:
    """Where the driver is another process."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The driver's own ears, for workers in its process."""

    dump: Dump | None = None  # is shown the learner's tensors
    stop: Callable[[], bool] = _never  # asked between rows of the feed
    tell: Callable[[Activity], None] = _to_nobody  # hears how far an evaluation is, and may raise to end it


@dataclass(frozen=True, slots=True)
class Assignment:
    """All that a process is given to become a worker."""

    post: Post
    config: Config
    model_path: Path | None
    dock: DockPlace
    node: str  # whose warehouse it uses
    host: str  # the address that others reach this node by
    logs: Path  # where it keeps its log and its counts
    device: str  # as a recipe names it
    threads: int  # of its numeric libraries
    dies_alone: bool = True  # without the driver: what it counts of its own work is then kept on file
    hooks: Hooks = field(default_factory=lambda: Hooks())


@dataclass(slots=True)
class OneProcess:
    """Where a learner and a rollout worker of one process meet: the one leaves word of what the other copies."""

    sources: Callable[[], Sources] | None = None


@dataclass(frozen=True, slots=True)
class WeightLink:
    """What every member of a link is told. Ranks: the learners' first, as in their world, then the rollout workers'."""

    token: str
    source: Layout
    target: Layout
    nodes: tuple[int, ...]  # of each rank
    store: StoreAddress | None = None  # where members of several nodes meet
    timeout_s: float = 120.0
    verify: Verify = "sample"
    one_process: OneProcess | None = None  # all members share it, and are rank 0

    @property
    def ranks(self) -> int:
        return len(self.nodes)
