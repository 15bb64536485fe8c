"""The dock's interface: what producers and consumers of samples may ask, whichever form of dock answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidemill.batch import Batch


@dataclass(frozen=True, slots=True)
class Want:
    """How much a consumer asks for. At least one of rows, groups, tokens; a take gives as much as is ready up to the
    first limit reached, and nothing before `at_least` is ready. Stages of scope `group` always get complete groups."""

    rows: int | None = None
    groups: int | None = None
    tokens: int | None = None  # budget of the column `length`; one oversized sample or group alone is still given
    at_least: int = 1  # rows (or groups, for a stage of scope `group`) that must be ready first
    sampler: str = "fifo"
    rank: int = 0  # this consumer's part of a decision made once for all `ranks`
    ranks: int = 1
    columns: tuple[str, ...] | None = None  # None: what the stage reads


class Lease(Protocol):
    """The right to work on some samples until a deadline."""

    @property
    def batch(self) -> Batch: ...

    def commit(self, outputs: Batch | None = None, drop: Sequence[int] = ()) -> None:
        """Write `outputs` (rows in the order of `batch`) and consume the rows, in one step. `drop`: ids to end here."""

    def renew(self) -> None: ...

    def abandon(self) -> None:
        """Give the rows back unchanged."""


@dataclass(frozen=True, slots=True)
class StageCounts:
    ready: int = 0
    leased: int = 0
    done: int = 0


@dataclass(frozen=True, slots=True)
class DockState:
    """What a person wants to see of a dock."""

    rows: int = 0
    bytes: int = 0
    version: int = 0
    stages: dict[str, StageCounts] = field(default_factory=dict)
    dropped: int = 0
    expired: int = 0


class Dock(Protocol):
    def put(self, rows: Batch) -> None:
        """Enter new rows; they carry `id` and `group`. Putting an id again changes nothing."""

    def take(self, stage: str, want: Want, wait: float = 0.0) -> Lease | None:
        """A lease on ready rows, or None when `wait` seconds passed without enough of them."""

    def advance(self, version: int) -> None:
        """The learner's weights are now `version`: what staleness is measured against."""

    def state(self) -> DockState: ...

    def close(self) -> None: ...
