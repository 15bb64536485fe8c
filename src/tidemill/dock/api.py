"""The dock's interface for producers and consumers of samples, the same for every form of dock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tidemill.batch import Batch
from tidemill.dock.ledger.counts import Counts, Tallied
from tidemill.errors import DockError


class LeaseExpired(DockError):
    """The lease expired (or the dock restarted) before this commit: the rows have been given to another."""


@dataclass(frozen=True, slots=True)
class Want:
    """How much a consumer wants: at least one of rows, groups, tokens. A take returns what is ready, up to the first
    limit reached, and nothing before `at_least` is ready. Stages of scope `group` always get complete groups."""

    rows: int | None = None
    groups: int | None = None
    tokens: int | None = None  # budget of the column `length`; a single oversized sample or group is still given
    at_least: int = 1  # rows (or groups, for a stage of scope `group`) that must be ready first
    sampler: str = "fifo"
    rank: int = 0  # this consumer's part of a decision made once for all `ranks`: the limits are the decision's,
    ranks: int = 1  # and each rank gets a share of about equal `length`; every rank asks with the same limits
    columns: tuple[str, ...] | None = None  # None: what the stage reads
    tag: str | None = None  # only rows that carry this tag
    group_size: int | None = None  # for rows put without `group_size`
    seed: int = 0  # of the sampler `shuffle`
    late: bool = (
        False  # when nothing is ready: take what another has held far longer than usual, to do it a second time
    )


Until = Literal["done", "idle", "all_leased"]  # what `Dock.progress` can wait for


@dataclass(frozen=True, slots=True)
class Progress:
    """One stage's progress with the rows of one tag, on which control flow decides. It counts rows in the dock that
    the stage has not consumed, without dropped ones."""

    pending: int = 0  # rows that the stage has not consumed, in any state
    ready: int = 0  # of these: rows with all their columns written that nobody has
    leased: int = 0  # of these: rows under a lease

    def has_come_to(self, until: Until) -> bool:
        return {"done": self.is_done, "idle": self.is_idle, "all_leased": self.is_all_leased}[until]

    @property
    def is_done(self) -> bool:
        """The stage has consumed every row that was put."""
        return self.pending == 0

    @property
    def is_idle(self) -> bool:
        """The stage has nothing to do until another stage commits or rows come back to it."""
        return self.ready + self.leased == 0

    @property
    def is_all_leased(self) -> bool:
        """Every row that the stage has yet to consume is under a lease: no more will arrive."""
        return self.leased == self.pending


class Lease(Protocol):
    """The right to work on some samples until a deadline."""

    @property
    def batch(self) -> Batch: ...

    @property
    def is_lost(self) -> bool:
        """Whether a renewal or the commit found that the rows have been given to another."""

    def commit(self, outputs: Batch | None = None, drop: Sequence[int] = (), counts: Counts | None = None) -> None:
        """Write `outputs` (rows in the order of `batch`) and consume the rows, in one step. `drop`: ids to end here.
        `counts`: counts of each row, kept with it and reported when it has left."""

    def renew(self) -> None:
        """Move the deadline to `lease_s` from now. Raises LeaseExpired, and sets `is_lost`, when it has passed."""

    def abandon(self) -> None:
        """Give the rows back unchanged."""


@dataclass(frozen=True, slots=True)
class StageCounts:
    ready: int = 0  # rows
    leased: int = 0
    done: int = 0  # since the dock began
    pending: int = 0  # in the dock, and not consumed by the stage
    waiting: int = 0  # takes parked until more is ready
    oldest_s: float = 0.0  # age of the ready row that has waited longest


@dataclass(frozen=True, slots=True)
class DockState:
    """A dock's state, for people."""

    rows: int = 0
    bytes: int = 0
    written: int = 0  # bytes put and committed so far
    version: int = 0
    stages: dict[str, StageCounts] = field(default_factory=dict)
    dropped: int = 0  # rows ended by a consumer, a sampler or staleness
    expired: int = 0  # leases that expired, or whose holder died
    stale: int = 0  # rows found too old, dropped or queued again
    ended: int = 0  # rows that left the dock, dropped ones included
    lost: int = 0  # rows whose bytes went with a warehouse, to be put again
    reissued: int = 0  # second leases on rows that another held far longer than usual
    puts_waiting: int = 0  # producers held back because the dock is full
    put_wait_s: float = 0.0  # total seconds that producers have waited
    refused: int = 0  # messages that did not authenticate or did not parse
    tags: dict[str, int] = field(default_factory=dict)  # rows by tag
    warehouses: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes in memory, spilled, pulled, ...


class Dock(Protocol):
    def put(self, rows: Batch, tag: str = "") -> None:
        """Put new rows, which have the columns `id` and `group`. Putting an id again changes nothing. Waits while
        the dock is full for this tag."""

    def take(self, stage: str, want: Want, wait: float = 0.0) -> Lease | None:
        """Return a lease on ready rows, or None when there were not enough within `wait` seconds."""

    def advance(self, version: int) -> None:
        """Announce the learner's weight version, against which staleness is measured."""

    def progress(self, stage: str, tag: str | None = None, until: Until | None = None, wait: float = 0.0) -> Progress:
        """Return the progress of `stage` with the rows of `tag` (None: with all rows). With `until`, return as soon
        as that holds, or after `wait` seconds."""

    def finished(self, stage: str, tag: str) -> list[int]:
        """Return the groups of `tag` that `stage` has consumed whole, those with the lowest number first."""

    def retag(self, groups: Sequence[int], tag: str) -> None:
        """Give all rows of these groups another tag."""

    def state(self) -> DockState:
        """Return counts for people. Control flow uses `progress`."""

    def counted(self) -> Tallied:
        """Return the counts of rows that have left since the last call, each row once. For a single reader."""

    def close(self) -> None: ...
