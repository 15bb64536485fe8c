"""Assignment: all that a process is given to become a worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidemill.cluster.placement import Post
from tidemill.config import Config
from tidemill.dock.address import Address


@dataclass(frozen=True, slots=True)
class Assignment:
    post: Post
    config: Config
    model_path: Path | None
    dock: Address
    node: str  # whose warehouse it uses
    host: str  # the address that others reach this node by
    logs: Path  # where it keeps its log and its counts
