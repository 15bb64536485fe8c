"""Workers as plain processes of this machine, forked from one that has imported everything: a start takes no second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tidemill.cluster.forks import ForkedHandle, Forks
from tidemill.cluster.placement import Placement, Post, Resources
from tidemill.device import host as machine
from tidemill.dock.address import Address


class ProcessStarter:
    home = ("node0", "127.0.0.1")

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def nodes(self) -> Sequence[Resources]:
        return [{"CPU": float(max(64, machine.cores()))}]  # processes of one machine share its cores as they can

    def reserve(self, placement: Placement) -> None: ...

    def spawn(self, post: Post, logs: Path) -> ForkedHandle:
        return self._forks.spawn(post.name, logs)

    def release(self, post: Post) -> None: ...

    def store(self, node: str, host: str, dock: Address, memory_mb: int | None) -> bool:
        return False  # the dock's own process on this machine

    def lost_stores(self) -> list[str]:
        return []

    def describe(self) -> str:
        return "processes of this machine"

    def close(self) -> None:
        self._forks.close()
