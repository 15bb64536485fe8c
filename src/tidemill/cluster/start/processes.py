"""Runs workers as plain processes of this machine, forked from one that has imported everything: a start takes under
a second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tidemill import device
from tidemill.cluster.start.forkserver import ForkedHandle, Forks
from tidemill.cluster.start.handle import Elsewhere
from tidemill.cluster.wiring import Post, Resources, Wiring
from tidemill.device import host as machine
from tidemill.dock.address import Address

PLENTY = 64.0  # processes of one machine share its cores, and its device where it has only one


class ProcessStarter(Elsewhere):
    home = ("node0", "127.0.0.1")
    address = ""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._kind, self._devices = "cpu", 0
        self._own: dict[str, int] = {}  # device by post

    def nodes(self) -> Sequence[Resources]:
        self._kind, self._devices = device.count()
        found = {"CPU": max(PLENTY, float(machine.cores()))}
        if self._devices:
            found[device.RESOURCES[self._kind]] = float(self._devices) if self._devices > 1 else PLENTY
        return [found]

    def reserve(self, wiring: Wiring) -> None:
        for post in wiring.posts:
            self._device_of(post)

    def spawn(self, post: Post, logs: Path) -> ForkedHandle:
        return self._forks.spawn(post.name, logs, self._device_of(post))

    def _device_of(self, post: Post) -> dict[str, str]:
        """Return the environment that gives a post its own device. A post that joins when none is free shares
        another's."""
        if not self._devices or device.RESOURCES[self._kind] not in dict(post.group.needs):
            return {}
        if post.name not in self._own:
            taken = list(self._own.values())
            self._own[post.name] = min(range(self._devices), key=taken.count)
        name = device.VISIBLE[self._kind]
        seen = os.environ.get(name, "").split(",") if os.environ.get(name) else [str(i) for i in range(self._devices)]
        return {name: seen[self._own[post.name]]}

    def release(self, post: Post) -> None:
        """Keep its device: the post is about to come back, or to be taken by another of the same name."""

    def store(self, node: str, host: str, dock: Address, memory_mb: int | None) -> bool:
        return False  # the dock's own process on this machine

    def lost_stores(self) -> list[str]:
        return []

    def describe(self) -> str:
        return "processes of this machine"

    def close(self) -> None:
        self._forks.close()
