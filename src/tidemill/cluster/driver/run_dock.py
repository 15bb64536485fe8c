"""The dock at which a run's workers meet: one of this process, or one of processes of its own, which is opened while
the workers start, and which another replaces when a step begins again."""

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
        """The driver's own way in."""

    @property
    def place(self) -> DockPlace:
        """What workers are told."""

    def store(self, member: Member) -> None:
        """A warehouse where the member is, unless there is one."""

    def lose(self, node: str) -> None:
        """A node's warehouse is gone, with what lay in it."""

    def renew(self) -> None:
        """Leave the dock with all that is in it, for another."""

    def close(self) -> None: ...


class OwnRunDock:
    """Of this process. `dump` sees all that goes through it."""

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
        """Its bytes are on this process's heap."""

    def lose(self, node: str) -> None:
        """It is not lost without this process."""

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
        """A dock of its own: nothing of an earlier one is left in it."""
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
