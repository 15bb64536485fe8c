"""Handles: how the driver reaches a worker, however it was started and wherever it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tidemill.cluster.commands import Request
from tidemill.cluster.wiring import Post, Resources, Wiring
from tidemill.dock.address import Address
from tidemill.graph import Graph
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.cluster.driver.run_dock import RunDock
    from tidemill.flow.dump import Dump

WATCH_S = 2.0  # a worker of another process reports at least this often


class WorkerLost(Exception):
    """The process is gone, or no longer answers."""


class Handle(Protocol):
    def call(self, request: Request[Any]) -> Future[Any]:
        """Return a future `Answer`; it raises `WorkerLost` when the process ends first."""

    def kill(self) -> None:
        """Kill it at once."""


class Starter(Protocol):
    """Places and starts workers. The worker pool watches and restarts them."""

    is_here: bool  # workers are in this process, so none is lost without it
    has_processes: bool  # workers have logs, stacks and states to look at from outside, and what they say travels
    watch_s: float  # longest that a worker which lives is not heard of

    def now(self) -> float:
        """Seconds on the clock that the workers live by. All control code asks this one."""

    def work(self, wait_s: float) -> float:
        """Do the work of workers that are in this process, for a moment, or wait for it. Gives how long is left to
        wait for workers that are elsewhere."""

    def open_dock(self, config: Config, graph: Graph, folder: Path, dump: Dump | None) -> RunDock:
        """Where the workers of a run meet; `folder` is the run's."""

    @property
    def is_stuck(self) -> bool:
        """Say whether no worker of this process has work or waits for any."""

    def nodes(self) -> Sequence[Resources]:
        """Return each node's resources, in use or not."""

    def reserve(self, wiring: Wiring) -> None:
        """Reserve the resources of all posts, or raise with the reason."""

    def spawn(self, post: Post, logs: Path) -> Handle: ...

    def release(self, post: Post) -> None:
        """Release a post's place: its process has ended for good, or is about to be started again."""

    def store(self, node: str, host: str, dock: Address, memory_mb: int | None) -> bool:
        """Make sure a warehouse of the dock runs on this node; return whether it is a new one."""

    def lost_stores(self) -> list[str]:
        """Return nodes whose warehouse has ended since the last call."""

    @property
    def home(self) -> tuple[str, str]:
        """Return this process's own node, and its address."""

    @property
    def address(self) -> str:
        """The address of the Ray that places processes; "" without Ray."""

    def describe(self) -> str: ...

    def close(self) -> None: ...


class Elsewhere:
    """The part of a starter that has no workers in this process."""

    is_here = False
    has_processes = True
    is_stuck = False
    watch_s = WATCH_S

    def now(self) -> float:
        return time.monotonic()

    def work(self, wait_s: float) -> float:
        return wait_s

    def open_dock(self, config: Config, graph: Graph, folder: Path, dump: Dump | None) -> RunDock:
        from tidemill.cluster.driver.run_dock import ServedRunDock

        return ServedRunDock(config, graph, folder / "dock", self)  # type: ignore[arg-type]
