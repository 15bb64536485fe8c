"""The dock at which a run's workers meet. It is opened while the workers start, and another takes its place when a step
begins again."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tidemill.cluster.driver.worker_pool import Member
from tidemill.cluster.start.handle import Starter
from tidemill.dock.address import Address
from tidemill.dock.client import RemoteDock
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup
from tidemill.flow.ahead import staleness_limit
from tidemill.graph import Graph
from tidemill.recipe.config import Config


class Meeting:
    def __init__(self, config: Config, graph: Graph, folder: Path, starter: Starter) -> None:
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
        shutil.rmtree(self.folder, ignore_errors=True)
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

    def store(self, member: Member) -> None:
        """A warehouse where the member is, unless there is one."""
        self.starter.store(member.node, member.host, self.server.address, self.memory_mb)

    def renew(self) -> Address:
        """Leave the dock with all that is in it, for another."""
        self._close()
        self._opened = self._background.submit(self._open)
        return self.server.address

    def _close(self) -> None:
        server, dock = self._opened.result()
        dock.close()
        server.close()

    def close(self) -> None:
        if self._opened.exception() is None:  # else opening it is what failed
            self._close()
        self._background.shutdown(wait=False)
