"""Controllers: the ledger's view of one stage, with its ready queue and its sampler's choice. Columns and stages are
bits of a row's masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tidemill.dock.api import Progress, Until, Want
from tidemill.dock.ledger import sampler
from tidemill.dock.ledger.leases import ConsumerPace
from tidemill.dock.ledger.ready import EMPTY, ReadyQueue
from tidemill.dock.ledger.records import META, Ints, Written
from tidemill.dock.ledger.table import TagCount
from tidemill.errors import DockError, did_you_mean
from tidemill.graph import Stage

if TYPE_CHECKING:
    from tidemill.dock.ledger.ledger import Ledger

MAX_BITS = 64  # stages, and columns that stages read: one bit each in a row's masks
SHUFFLE_WINDOW = 1024
GONE = -2  # no version, no tag


class Controller:
    def __init__(self, ledger: Ledger, index: int, stage: Stage, reads: int, group_index: int) -> None:
        self.ledger = ledger
        self.index = index
        self.stage = stage
        self.bit = np.uint64(1 << index)
        self.reads = np.uint64(reads)
        self.group_index = group_index  # index among the stages of scope `group`; -1 for others
        self.is_group = stage.scope == "group"
        self.ready = ReadyQueue({"version": self._versions, "tag": self._tags}, changing=("version", "tag"))
        self.leased = self.done = 0  # rows
        self.pending, self.held = TagCount(), TagCount()  # rows not consumed yet; of these, rows under a lease
        self.turn = 0  # decisions made
        self.pace = ConsumerPace()
        self.parts: dict[int, list[int]] = {}  # rank -> leases decided for it and not yet fetched

    def wanted(self, want: Want) -> tuple[str, ...]:
        if want.columns is None:
            return self.stage.reads
        for column in want.columns:
            if column not in self.stage.reads and column not in META:
                hint = did_you_mean(column, self.stage.reads)
                raise DockError(f"stage {self.stage.name!r} does not read column {column!r}{hint}", "add it to `reads`")
        return want.columns

    def check_outputs(self, what: Written) -> None:
        missing = [c for c in self.stage.writes if c not in what.columns]
        if missing and what.columns:
            got = ", ".join(what.columns)
            raise DockError(f"stage {self.stage.name!r} writes {', '.join(missing)}, but its outputs have only {got}")
        for column in what.columns:
            if column not in self.stage.writes and column not in META:
                hint = did_you_mean(column, self.stage.writes)
                raise DockError(f"stage {self.stage.name!r} does not write {column!r}{hint}", "add it to `writes`")

    # -- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, want: Want) -> tuple[Ints | None, Ints]:
        """Choose the units that `want` gets (None: too few are ready yet), and units without a learning signal, to
        be dropped."""
        least = max(want.at_least, want.ranks)
        limit = want.groups if self.is_group else want.rows
        if limit is not None and limit < least:
            what = "groups" if self.is_group else "rows"
            raise DockError(
                f"a want of at most {limit} {what} can never have at_least {want.at_least} for {want.ranks} ranks",
                f"raise want.{what} to {least} or more",
            )
        if self.ready.count < least:
            return None, EMPTY
        look = max(least, min(limit or 64, self.ready.count))
        if want.sampler == "shuffle":
            look = max(look, SHUFFLE_WINDOW)
        all_dull = EMPTY
        while True:
            units = self._candidates(want, look)
            is_all = len(units) < look
            if want.sampler == "differing":
                units, all_dull = self._set_dull_aside(units)
            if want.tokens is not None or (self.is_group and want.rows is not None):
                n = sampler.prefix(self.describe(units), want, self.is_group)
            else:  # the same without arrays: no budget
                n = min(len(units), limit or len(units))
            if is_all or n < len(units):  # else everything looked at fits, and more might
                break
            if limit is not None and n >= limit:
                break
            look *= 2
        if n < least and (n == len(units) or want.tokens is None):
            return None, all_dull
        self.turn += 1
        return units[:n], all_dull

    def _candidates(self, want: Want, k: int) -> Ints:
        """Return the first k ready units in the sampler's order."""
        if want.tag is not None:
            code = self.ledger.tag_code(want.tag)
            if want.sampler == "oldest":
                units = self.ready.first_of("tag", code, self.ready.count)
                return units[np.argsort(self._versions(units), kind="stable")][:k]
            units = self.ready.first_of("tag", code, k)
        elif want.sampler == "oldest":
            return self._oldest(k)
        else:
            units = self.ready.first(k)
        if want.sampler == "shuffle":
            units = units[sampler.shuffle(len(units), want.seed, self.turn)]
        return units

    def _oldest(self, k: int) -> Ints:
        found = EMPTY
        for version in self.ready.known_keys("version"):
            found = np.concatenate([found, self.ready.first_of("version", version, k - len(found))])
            if len(found) >= k:
                break
        return found

    def _set_dull_aside(self, units: Ints) -> tuple[Ints, Ints]:
        if not self.is_group:
            raise DockError(
                f"sampler 'differing' compares the rewards of a group; stage {self.stage.name!r} reads single samples",
                "give the stage scope='group', or use another sampler",
            )
        keep = sampler.differing(self.describe(units))
        return units[keep], units[~keep]

    # -- progress ----------------------------------------------------------------------------------------------------

    def holds(self, until: Until, tag: str | None) -> bool:
        """Say whether a waiter's condition holds. Called after every step, so it uses only counts."""
        code = None if tag is None else self.ledger.tag_code(tag)
        if until == "done":
            return self.pending.of(code) == 0
        if until == "all_leased":
            return self.held.of(code) == self.pending.of(code)
        return self.held.of(code) == 0 and not len(self._ready_units(code, 1))

    def progress(self, tag: str | None) -> Progress:
        code = None if tag is None else self.ledger.tag_code(tag)
        ready = self.rows_of(self._ready_units(code, self.ready.count)) if self.ready.count else 0
        return Progress(self.pending.of(code), ready, self.held.of(code))

    def _ready_units(self, tag: int | None, most: int) -> Ints:
        return self.ready.first(most) if tag is None else self.ready.first_of("tag", tag, most)

    # -- properties of units
    # --------------------------------------------------------------------------------------------

    def slots(self, units: Ints) -> Ints:
        """Return the rows of units."""
        if not self.is_group:
            return units
        members = [group.members for group in self.ledger.groups.at(units.tolist())]
        return np.array(members[0] if len(members) == 1 else list(chain.from_iterable(members)), np.int64)

    def rows_of(self, units: Ints) -> int:
        """Return how many rows units have."""
        return int(self.ledger.groups.rows_here[units].sum()) if self.is_group else len(units)

    def ready_rows(self) -> int:
        if not self.is_group or not self.ready.count:
            return self.ready.count
        return self.rows_of(self.ready.all())

    def describe(self, units: Ints) -> sampler.Units:
        rows = self.ledger.rows
        if not self.is_group:
            n = len(units)
            return sampler.Units(np.ones(n, np.int64), rows.length[units].astype(np.int64), np.full(n, np.nan))
        members, starts, counts = self._members(units)
        if not len(units):
            return sampler.Units(counts, counts, np.empty(0))
        score = rows.score[members].astype(np.float64)
        spread = np.maximum.reduceat(score, starts) - np.minimum.reduceat(score, starts)
        return sampler.Units(counts, np.add.reduceat(rows.length[members].astype(np.int64), starts), spread)

    def _members(self, units: Ints) -> tuple[Ints, Ints, Ints]:
        groups = self.ledger.groups.at(units.tolist())
        counts = np.array([len(group.members) for group in groups], np.int64)
        return self.slots(units), np.cumsum(counts) - counts, counts

    def _versions(self, units: Ints) -> npt.NDArray[Any]:
        """Return the versions of units; a group's is that of its oldest row."""
        versions = self.ledger.rows.version
        if not self.is_group:
            return versions[units]
        return self._of_groups(units, lambda members: int(versions[members].min()))

    def _tags(self, units: Ints) -> npt.NDArray[Any]:
        tags = self.ledger.rows.tag
        if not self.is_group:
            return tags[units]
        first = self.ledger.groups.first_slot[units]
        return np.where(first >= 0, tags[first], GONE)  # -1 reads some row's, which is not used

    def _of_groups(self, units: Ints, value: Callable[[list[int]], int]) -> Ints:
        """Return a value of each unit's group. Groups that are gone (dead queue entries) get the value GONE."""
        groups = [self.ledger.groups.get(handle) for handle in units.tolist()]
        return np.array([value(g.members) if g is not None and g.members else GONE for g in groups], np.int64)


def make_controllers(stages: Sequence[Stage], ledger: Ledger) -> tuple[list[Controller], dict[str, int]]:
    """Make the controllers, one per stage, and the bit of every column that a stage reads."""
    columns = dict.fromkeys([*META, *(column for stage in stages for column in stage.reads)])
    for what, n in (("stages", len(stages)), ("columns that stages read", len(columns))):
        if n > MAX_BITS:
            raise DockError(f"a dock serves at most {MAX_BITS} {what}, got {n}")
    bits = {column: 1 << i for i, column in enumerate(columns)}
    controllers: list[Controller] = []
    groups = 0
    for index, stage in enumerate(stages):
        reads = sum(bits[column] for column in dict.fromkeys(stage.reads))
        controllers.append(Controller(ledger, index, stage, reads, groups if stage.scope == "group" else -1))
        groups += stage.scope == "group"
    return controllers, bits


class Columns:
    """The parts of a row: part 0 was put, with any columns; part s+1 was committed by stage s."""

    def __init__(self, controllers: Sequence[Controller], bits: dict[str, int]) -> None:
        self._controllers, self._bits = controllers, bits
        self._of_part = [set[str]()] + [set(c.stage.writes) for c in controllers]
        self._masks: dict[tuple[str, ...], np.uint64] = {}
        self._news: dict[tuple[str, ...], tuple[np.uint64, list[Controller]]] = {}
        self._parts: dict[tuple[str, ...], list[int]] = {}
        self.readers = self._find_readers()  # by part, the stages that read some of it

    @property
    def source(self) -> set[str]:
        return self._of_part[0]

    def mask(self, columns: tuple[str, ...]) -> np.uint64:
        if columns not in self._masks:
            self._masks[columns] = np.uint64(sum(self._bits.get(column, 0) for column in {*columns, *META[:2]}))
        return self._masks[columns]

    def news(self, columns: tuple[str, ...]) -> tuple[np.uint64, list[Controller]]:
        """Return the mask of columns, and the stages that read some of them."""
        if columns not in self._news:
            mask = self.mask(columns)
            self._news[columns] = mask, [c for c in self._controllers if mask & c.reads]
        return self._news[columns]

    def parts_with(self, columns: tuple[str, ...]) -> list[int]:
        """Return the parts that may hold some of these columns."""
        if columns not in self._parts:
            self._parts[columns] = [i for i, names in enumerate(self._of_part) if not names.isdisjoint(columns)]
        return self._parts[columns]

    def learn_source(self, columns: tuple[str, ...]) -> None:
        """Note the columns of a put; other puts may have more."""
        if not self.source.issuperset(columns):
            self.source.update(columns)
            self._parts.clear()
            self.readers = self._find_readers()

    def _find_readers(self) -> list[np.uint64]:
        return [
            np.uint64(sum(int(c.bit) for c in self._controllers if not names.isdisjoint(c.stage.reads)))
            for names in self._of_part
        ]
