"""The dock's interface: what producers and consumers of samples may ask, whichever form of dock answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tidemill.batch import Batch
from tidemill.dock.ledger.counts import Counts, Tallied
from tidemill.errors import DockError


class LeaseExpired(DockError):
    """The lease ran out (or the dock restarted) before this commit: the rows are someone else's now."""


@dataclass(frozen=True, slots=True)
class Want:
    """How much a consumer asks for. At least one of rows, groups, tokens; a take gives as much as is ready up to the
    first limit reached, and nothing before `at_least` is ready. Stages of scope `group` always get complete groups."""

    rows: int | None = None
    groups: int | None = None
    tokens: int | None = None  # budget of the column `length`; one oversized sample or group alone is still given
    at_least: int = 1  # rows (or groups, for a stage of scope `group`) that must be ready first
    sampler: str = "fifo"
    rank: int = 0  # this consumer's part of a decision made once for all `ranks`: the limits are the decision's,
    ranks: int = 1  # and each rank gets a share of about equal `length`; every rank asks with the same limits
    columns: tuple[str, ...] | None = None  # None: what the stage reads
    tag: str | None = None  # only rows that carry this tag
    group_size: int | None = None  # for rows put without `group_size`
    seed: int = 0  # of the sampler `shuffle`
    late: bool = False  # where nothing is ready: what another holds far longer than usual, to be done a second time


Until = Literal["done", "idle", "all_leased"]  # what `Dock.progress` can wait for


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one stage is with the rows of one tag: what control flow decides by. Rows are counted that are in the
    dock and that the stage has not consumed; a dropped row is not counted."""

    pending: int = 0  # rows that the stage has not consumed, wherever they stand
    ready: int = 0  # of these: all their columns are written, nobody has them
    leased: int = 0  # of these: somebody works on them

    def has_come_to(self, until: Until) -> bool:
        return {"done": self.is_done, "idle": self.is_idle, "all_leased": self.is_all_leased}[until]

    @property
    def is_done(self) -> bool:
        """The stage has consumed every row that was put."""
        return self.pending == 0

    @property
    def is_idle(self) -> bool:
        """The stage has nothing to do before another stage commits or rows come back to it."""
        return self.ready + self.leased == 0

    @property
    def is_all_leased(self) -> bool:
        """Every row that the stage has yet to consume is under a lease: no more will come."""
        return self.leased == self.pending


class Lease(Protocol):
    """The right to work on some samples until a deadline."""

    @property
    def batch(self) -> Batch: ...

    @property
    def is_lost(self) -> bool:
        """Whether a renewal or the commit found that the rows are someone else's now."""

    def commit(self, outputs: Batch | None = None, drop: Sequence[int] = (), counts: Counts | None = None) -> None:
        """Write `outputs` (rows in the order of `batch`) and consume the rows, in one step. `drop`: ids to end here.
        `counts`: what was counted of each row, kept beside it and told when it has left."""

    def renew(self) -> None:
        """Move the deadline to `lease_s` from now. Raises LeaseExpired, and sets `is_lost`, when it has passed."""

    def abandon(self) -> None:
        """Give the rows back unchanged."""


@dataclass(frozen=True, slots=True)
class StageCounts:
    ready: int = 0  # rows
    leased: int = 0
    done: int = 0
    waiting: int = 0  # takes parked until more is ready
    oldest_s: float = 0.0  # age of the row that has waited longest among the ready


@dataclass(frozen=True, slots=True)
class DockState:
    """What a person wants to see of a dock."""

    rows: int = 0
    bytes: int = 0
    version: int = 0
    stages: dict[str, StageCounts] = field(default_factory=dict)
    dropped: int = 0  # rows ended by a consumer, a sampler or staleness
    expired: int = 0  # leases that ran out, or whose holder died
    stale: int = 0  # rows found too old, dropped or queued again
    ended: int = 0  # rows that left the dock, dropped ones included
    lost: int = 0  # rows whose bytes went with a warehouse, to be put again
    reissued: int = 0  # leases on what somebody else held for far longer than usual
    puts_waiting: int = 0  # producers held back because the dock is full
    put_wait_s: float = 0.0  # seconds that producers have waited in all
    refused: int = 0  # messages that did not authenticate or did not parse
    tags: dict[str, int] = field(default_factory=dict)  # rows by tag
    warehouses: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes in memory, spilled, pulled, ...


class Dock(Protocol):
    def put(self, rows: Batch, tag: str = "") -> None:
        """Enter new rows; they carry `id` and `group`. Putting an id again changes nothing. Waits while the dock holds
        all that it may of this tag."""

    def take(self, stage: str, want: Want, wait: float = 0.0) -> Lease | None:
        """A lease on ready rows, or None when `wait` seconds passed without enough of them."""

    def advance(self, version: int) -> None:
        """The learner's weights are now `version`: what staleness is measured against."""

    def progress(self, stage: str, tag: str | None = None, until: Until | None = None, wait: float = 0.0) -> Progress:
        """How far `stage` is with the rows of `tag` (None: with all rows). With `until`, come back as soon as that
        holds, woken by the step that makes it so, or after `wait` seconds."""

    def state(self) -> DockState:
        """Counts for people. Control flow asks `progress`."""

    def counted(self) -> Tallied:
        """What commits counted of the rows that have left since this was last asked: each row once. One reader asks."""

    def close(self) -> None: ...
