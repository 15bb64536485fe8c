"""Records that the driver sends out: an assignment makes a process a worker, a link joins learners and rollout
workers."""

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
from tidemill.reshard.layouts.layout import Layout
from tidemill.reshard.move import Verify

if TYPE_CHECKING:
    from tidemill.cluster.worker.weights import Sources
    from tidemill.flow.dump import Dump


@dataclass(frozen=True, slots=True)
class DockDoor:
    """A worker's connection to the dock. Its leases are renewed while it works."""

    dock: Dock
    leave: Callable[[], None]  # wakes threads that wait there; for a dock that is about to end
    leases: Callable[[], int] = lambda: 0  # number of leases held


class DockPlace(Protocol):
    """The place of a run's dock."""

    @property
    def ledger(self) -> str:
        """Names the dock: counts of another dock do not count here."""

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
    """Callbacks of the driver, for workers in its process."""

    dump: Dump | None = None  # is shown the learner's tensors
    stop: Callable[[], bool] = _never  # called between rows of the feed
    tell: Callable[[Activity], None] = _to_nobody  # receives an evaluation's progress, and may raise to end it


@dataclass(frozen=True, slots=True)
class Assignment:
    """Everything that makes a process a worker."""

    post: Post
    config: Config
    model_path: Path | None
    dock: DockPlace
    node: str  # the node whose warehouse it uses
    host: str  # the address by which others reach this node
    logs: Path  # folder of its log and its counts
    device: str  # as a recipe names it
    threads: int  # of its numeric libraries
    dies_alone: bool = True  # it may die without the driver, so its own counts are kept in a file
    hooks: Hooks = field(default_factory=lambda: Hooks())


@dataclass(slots=True)
class OneProcess:
    """Where a learner and a rollout worker of one process meet: the learner leaves what rollout is to copy."""

    sources: Callable[[], Sources] | None = None


@dataclass(frozen=True, slots=True)
class WeightLink:
    """Sent to every member of a link. Ranks: first the learners' in the order of their world, then the rollout
    workers'."""

    token: str
    source: Layout
    target: Layout
    nodes: tuple[int, ...]  # of each rank
    store: StoreAddress | None = None  # the store of members on several nodes
    timeout_s: float = 120.0
    verify: Verify = "sample"
    one_process: OneProcess | None = None  # all members share it, and are rank 0

    @property
    def ranks(self) -> int:
        return len(self.nodes)
