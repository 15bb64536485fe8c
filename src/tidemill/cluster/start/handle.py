"""Handles: how the driver reaches a worker, whoever started it and wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from tidemill.cluster.commands import Request
from tidemill.cluster.wiring import Post, Resources, Wiring
from tidemill.dock.address import Address


class WorkerLost(Exception):
    """The process is gone, or does not answer any more."""


class Handle(Protocol):
    def call(self, request: Request[Any]) -> Future[Any]:
        """An `Answer` to come; `WorkerLost` when the process ends first."""

    def kill(self) -> None:
        """End it at once, without asking it."""


class Starter(Protocol):
    """Places and starts workers; watching and restarting them is the worker pool's."""

    is_here: bool  # workers are in this process: none of them is lost without it

    def work(self, wait_s: float) -> None:
        """Do the work of workers that are in this process, for a moment, or wait for it; else nothing."""

    @property
    def is_stuck(self) -> bool:
        """Whether no worker of this process has anything to do, or waits for anything."""

    def nodes(self) -> Sequence[Resources]:
        """What each node has, all of it, whether in use or not."""

    def reserve(self, wiring: Wiring) -> None:
        """Set the resources of its posts aside, or say why not."""

    def spawn(self, post: Post, logs: Path) -> Handle: ...

    def release(self, post: Post) -> None:
        """The process of a post has ended for good, or is about to be started anew."""

    def store(self, node: str, host: str, dock: Address, memory_mb: int | None) -> bool:
        """See that a warehouse of the dock runs on this node; whether it is a new one."""

    def lost_stores(self) -> list[str]:
        """Nodes whose warehouse has ended since this was last asked."""

    @property
    def home(self) -> tuple[str, str]:
        """This process's own node, and its address."""

    @property
    def address(self) -> str:
        """Of the Ray that places processes; "" where there is none."""

    def describe(self) -> str: ...

    def close(self) -> None: ...


class Elsewhere:
    """What a starter of other processes has to say of the work in this one."""

    is_here = False
    is_stuck = False

    def work(self, wait_s: float) -> None:
        """There is none."""
