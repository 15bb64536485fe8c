"""What the driver hands out: an assignment makes a process a worker, a link joins learners and rollout workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidemill.cluster.driver.placement import Post
from tidemill.cluster.report import StoreAddress
from tidemill.dock.address import Address
from tidemill.recipe.config import Config
from tidemill.reshard.layout import Layout
from tidemill.reshard.move import Verify


@dataclass(frozen=True, slots=True)
class Assignment:
    """All that a process is given to become a worker."""

    post: Post
    config: Config
    model_path: Path | None
    dock: Address
    node: str  # whose warehouse it uses
    host: str  # the address that others reach this node by
    logs: Path  # where it keeps its log and its counts


@dataclass(frozen=True, slots=True)
class WeightLink:
    """What every member of a wire is told. Ranks: the learners' first, as in their world, then the rollout workers'."""

    token: str
    source: Layout
    target: Layout
    nodes: tuple[int, ...]  # of each rank
    store: StoreAddress | None = None  # where members of several nodes meet
    timeout_s: float = 120.0
    verify: Verify = "sample"

    @property
    def ranks(self) -> int:
        return len(self.nodes)
