"""A run's dock: in this process, or in processes of its own. The latter is opened while the workers start, and
replaced by another when a step begins again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from tidemill.cluster.assignment import DockPlace, ServedDock
from tidemill.cluster.driver.worker_pool import Member
from tidemill.cluster.start.handle import Starter
from tidemill.dock import Dock, LocalDock
from tidemill.flow.dump import Dump, DumpingDock
from tidemill.flow.schedule import staleness_limit
from tidemill.graph import Graph
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.dock.client import RemoteDock
    from tidemill.dock.server import DockServer


class RunDock(Protocol):
    @property
    def dock(self) -> Dock:
        """The driver's own connection."""

    @property
    def place(self) -> DockPlace:
        """The address for workers."""

    def store(self, member: Member) -> None:
        """Start a warehouse on the member's node, unless there is one."""

    def lose(self, node: str) -> None:
        """Report that a node's warehouse is gone, with its bytes."""

    def renew(self) -> None:
        """Replace the dock, with all that is in it, by another."""

    def close(self) -> None: ...


class OwnRunDock:
    """A dock in this process. `dump` sees everything that passes through it."""

    def __init__(self, config: Config, graph: Graph, dump: Dump | None) -> None:
        from tidemill.cluster.start.local import OwnDock

        made = LocalDock(
            graph.stages,
            source=graph.source,
            lease_s=config.flow.lease_s,
            max_staleness=staleness_limit(config),
            stale="requeue",
            renews=True,
        )
        self.dock: Dock = made if dump is None else cast(Dock, DumpingDock(made, dump))
        self.place: DockPlace = OwnDock(self.dock)

    def store(self, member: Member) -> None:
        """Do nothing: its bytes are on this process's heap."""

    def lose(self, node: str) -> None:
        """Do nothing: it cannot be lost without this process."""

    def renew(self) -> None:
        raise NotImplementedError("a step in one process does not begin again")

    def close(self) -> None:
        self.dock.close()


class ServedRunDock:
    """A ledger and warehouses, in processes of their own."""

    def __init__(self, config: Config, graph: Graph, folder: Path, starter: Starter) -> None:
        from tidemill.dock.setup import DockSetup

        self.folder, self.starter = folder, starter
        cluster = config.cluster
        self.memory_mb = cluster.memory_mb
        self.setup = DockSetup(
            stages=graph.stages,
            source=graph.source,
            lease_s=cluster.lease_s,
            max_staleness=staleness_limit(config),
            stale="requeue",
            replicas=cluster.replicas,
            memory_bytes=None if cluster.memory_mb is None else cluster.memory_mb << 20,
        )
        self._background = ThreadPoolExecutor(1, "dock")
        self._opened = self._background.submit(self._open)

    def _open(self) -> tuple[DockServer, RemoteDock]:
        """Open a new dock, empty of anything from an earlier one."""
        from tidemill.dock.client import RemoteDock
        from tidemill.dock.server import DockServer, remove_dock

        remove_dock(self.folder)
        node, host = self.starter.home
        server = DockServer(self.setup, self.folder, host, nodes=(node,))
        try:
            return server, RemoteDock(server.address, node)
        except BaseException:
            server.close()
            raise

    @property
    def server(self) -> DockServer:
        return self._opened.result()[0]

    @property
    def dock(self) -> RemoteDock:
        return self._opened.result()[1]

    @property
    def place(self) -> DockPlace:
        return ServedDock(self.server.address)

    def store(self, member: Member) -> None:
        self.starter.store(member.node, member.host, self.server.address, self.memory_mb)

    def lose(self, node: str) -> None:
        self.server.lose(node)

    def renew(self) -> None:
        self._close()
        self._opened = self._background.submit(self._open)

    def _close(self) -> None:
        server, dock = self._opened.result()
        dock.close()
        server.close()

    def close(self) -> None:
        if self._opened.exception() is None:  # else opening it is what failed
            self._close()
        self._background.shutdown(wait=False)
