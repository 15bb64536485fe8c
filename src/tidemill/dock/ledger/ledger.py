"""The ledger: which sample is where and who may have it. Metadata only, no I/O, no clock of its own. It is a state
machine: every method is one atomic step; the caller provides the time and serialises the calls. The same class serves
the in-process dock and the ledger process. It promises: a stage consumes a row once; a row is leased to one consumer of
a stage at a time; a group stage gets whole groups; what no stage needs any more is freed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tidemill.batch import GROUP, ID, LENGTH, VERSION
from tidemill.dock.api import DockState, LeaseExpired, Progress, StageCounts, Want
from tidemill.dock.ledger import life, sampler
from tidemill.dock.ledger import requeue as again
from tidemill.dock.ledger.controller import Columns, Controller, make_controllers
from tidemill.dock.ledger.counts import CountBook, Tallied
from tidemill.dock.ledger.credit import Chunks, CreditedChunk
from tidemill.dock.ledger.ended import EndedIds
from tidemill.dock.ledger.groups import Groups
from tidemill.dock.ledger.leases import Committed, Leases, latest
from tidemill.dock.ledger.ready import EMPTY
from tidemill.dock.ledger.records import Grant, HeldLease, Ints, Piece, Written
from tidemill.dock.ledger.table import LIVE, Rows, RowTable
from tidemill.dock.net.compact import is_range, span
from tidemill.errors import DockError, did_you_mean
from tidemill.graph import Stage


class Ledger:
    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        lease_s: float = 600.0,
        max_staleness: int | None = None,
        stale: Literal["requeue", "drop"] = "drop",
        group_size: int | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        watch: str = "reward",
        epoch: int = 1,
    ) -> None:
        if stale not in ("requeue", "drop"):
            raise DockError(f"stale must be 'requeue' or 'drop', got {stale!r}")
        self.lease_s, self.max_staleness, self.stale_policy = lease_s, max_staleness, stale
        self.watch = watch  # the column that samplers may compare
        self.version = 0
        self.touched: set[str] = set()  # stages that got ready rows since the caller's last check
        self.effects: list[tuple[Any, ...]] | None = None  # events for a journal; None: there is no journal
        self.dropped = self.expired = self.stale = self.ended = self.lost = self.reissued = 0
        self.missing: list[int] = []  # ids whose bytes are lost: only their producer can put them again
        self.gone: set[int] = set()  # chunks whose bytes are lost
        self.controllers, bits = make_controllers(stages, self)
        self.columns = Columns(self.controllers, bits)
        self.highest_id = -(1 << 63)
        self.chunks = Chunks(max_rows, max_bytes)
        self.counts = CountBook()
        self.rows = RowTable(parts=len(stages) + 1)
        self._by_name = {c.stage.name: c for c in self.controllers}
        self.group_stages = [c for c in self.controllers if c.is_group]
        self.group_bits = np.uint64(sum(int(c.bit) for c in self.group_stages))
        self.all_stages = np.uint64((1 << len(stages)) - 1)
        self.groups = Groups(len(self.group_stages), group_size)
        self.slot_of: dict[int, int] = {}
        self.ended_ids = EndedIds()
        self.tags: dict[int, str] = {}  # of the rows that are here, by code; a code is never used again
        self.next_tag = 0
        self._tag_codes: dict[str, int] = {}
        self.leases = Leases(epoch)
        self.keeps = max((stage.keeps for stage in stages), default=0)
        self.kept: Ints = np.empty(0, np.int64)  # rows that all stages are through with, those with the lowest id first
        self.committed = Committed()
        self.serial = 0

    # -- producing ---------------------------------------------------------------------------------------------------

    def put(self, ids: Ints, group: Ints, sizes: Ints | None, what: Written, tag: str, now: float) -> int:
        """Add rows; known ones are left as they are. Returns how many were new."""
        fresh = life.fresh(self, ids.tolist())
        n = len(fresh)
        if n == 0:
            self.chunks.add(what.chunk, CreditedChunk(what.columns, what.nbytes, 0, tag))
            return 0
        if self.group_stages:
            keys, known = group[fresh].tolist(), None if sizes is None else sizes[fresh].tolist()
            self.groups.check_room(keys, known)
        if self.effects is not None:
            self.effects.append(("put", ids, group, sizes, what, tag, now))
        slots = life.enter(self, ids[fresh], group[fresh], what, fresh, tag, now)
        if self.group_stages:
            self.groups.join(keys, slots.tolist(), known)
        written = self.columns.mask(what.columns)
        for c in self.controllers:
            if written & c.reads == c.reads:
                life.make_ready(self, c, slots)
        again.sift(self, slots)
        return n

    def advance(self, version: int) -> None:
        """Set the weight version; rows that are now too old and not under a lease are dropped or queued again."""
        self.version = version
        if self.effects is not None:
            self.effects.append(("advance", version))
        again.sift(self, self.rows.live())

    def retag(self, groups: Iterable[int], tag: str) -> None:
        """Give the rows of these groups another tag, wherever they are."""
        slots = self.rows.live()
        slots = slots[np.isin(self.rows.group[slots], np.fromiter(groups, np.int64))]
        if self.effects is not None:
            self.effects.append(("retag", self.rows.id[slots], tag))
        life.retag(self, slots, tag)

    def drop(self, ids: Iterable[int]) -> int:
        """End rows wherever they are. Returns how many were still here."""
        slots = self.slots_of(ids)
        life.end(self, slots)
        return len(slots)

    # -- consuming ---------------------------------------------------------------------------------------------------

    def take(self, stage: str, want: Want, now: float, owner: bytes = b"") -> Grant | None:
        """Grant a lease on what `want` asks for; None when not enough is ready."""
        c = self.controller(stage)
        sampler.check(want)
        if c.is_group and self.groups.size is None and want.group_size is not None:
            for group in self.groups.learn_size(want.group_size):
                for other in self.group_stages:
                    life.queue_if_complete(self, other, group.key)
        if c.is_group and self.groups.has_unsized:
            raise DockError(
                f"stage {stage!r} takes whole groups, but nobody said how many rows a group has",
                "put a column `group_size`, or give group_size to the dock or to the want",
            )
        columns = c.wanted(want)
        if want.sampler == "replay":
            return self._replay(c, want, columns, now, owner)
        if want.ranks > 1:
            return self._take_part(c, want, columns, now, owner)
        units = self._choose(c, want)
        if units is None:
            return self._second(c, columns, now, owner) if want.late else None
        return self._grant(self._lease(c, c.slots(units), columns, now, owner))

    def commit(self, lease: int, what: Written, drop: Iterable[int], now: float) -> None:
        """Write the outputs and consume the rows, in one step. Refused if the lease is no longer held."""
        if lease in self.committed:  # the first commit's answer was lost
            self.chunks.add(what.chunk, CreditedChunk((), 0, 0, ""))
            return
        held = self._held_lease(lease, now)
        c, slots = self.controllers[held.stage], held.slots
        if held.is_replay:
            self._give_back(self.leases.pop(lease))
            return
        c.check_outputs(what)
        if what.counts is not None:
            what.counts.check(len(slots))
        self.leases.pop(lease)
        if held.twin:
            self.leases.pop(held.twin)
        c.pace.add(now - held.since)
        c.leased -= len(slots)
        rows, where = self.rows, slots if held.where is None else held.where
        rows.leased[where] &= ~c.bit
        keep = rows.state[where] == LIVE
        is_whole = bool(keep.all())
        c.held.add(rows.tag[where] if is_whole else rows.tag[slots[keep]], -1)
        ids = rows.id[where]
        if ended := set(drop):
            keep &= ~np.isin(ids, np.fromiter(ended, np.int64, len(ended)))
            is_whole = bool(keep.all())
        if is_whole:  # the usual case
            places, kept, gone, where = np.arange(len(slots)), slots, EMPTY, where
        else:
            places = np.flatnonzero(keep)
            kept = where = slots[places]
            gone = slots[~keep]
        if self.effects is not None:
            self.effects.append(("commit", lease, c.stage.name, ids[places], places, what, ids[~keep]))
        life.count(self, ids, what)
        life.finish(self, c, lease, Rows(kept, where), places, what, gone)
        again.sift(self, kept)

    def renew(self, lease: int, now: float) -> float:
        held = self._held_lease(lease, now)
        held.deadline = now + self.lease_s
        return held.deadline

    def lease_rows(self, lease: int, now: float) -> int:
        """Return how many rows a lease holds; refused if it is no longer held."""
        return len(self._held_lease(lease, now).slots)

    def abandon(self, lease: int) -> None:
        """Give the rows back. A lease that is gone has done so already."""
        if lease in self.leases:
            self._give_back(self.leases.pop(lease))

    def release(self, owner: bytes) -> int:
        """End the leases of an owner whose process has ended, without waiting for their deadlines."""
        return self._end_leases(self.leases.of(owner))

    def expire(self, now: float) -> int:
        """Give back the rows of overdue leases. Returns how many leases there were."""
        return self._end_leases(self.leases.overdue(now))

    def tell(self, heard: int) -> Tallied:
        """Return the counts of rows that have left. `heard`: the number of the last report that arrived."""
        if self.effects is not None:
            self.effects.append(("tell", heard))
        return self.counts.tell(heard)

    def _end_leases(self, keys: list[int]) -> int:
        for key in keys:
            self._give_back(self.leases.pop(key))
        self.expired += len(keys)
        return len(keys)

    # -- looking -----------------------------------------------------------------------------------------------------

    def controller(self, stage: str) -> Controller:
        if stage not in self._by_name:
            known = ", ".join(self._by_name)
            raise DockError(f"no stage {stage!r}{did_you_mean(stage, self._by_name)}", f"this dock serves: {known}")
        return self._by_name[stage]

    def slots_of(self, ids: Iterable[int]) -> Ints:
        return np.array([self.slot_of[i] for i in ids if i in self.slot_of], np.int64)

    def tag_code(self, tag: str) -> int:
        return self._tag_codes.get(tag, -1)

    def learn_tag(self, tag: str) -> None:
        if tag not in self._tag_codes:
            self.load_tag(self.next_tag, tag)
            self.next_tag += 1

    def load_tag(self, code: int, tag: str) -> None:
        self._tag_codes[tag], self.tags[code] = code, tag

    def count_rows(self, tag: str, n: int) -> None:
        """Count rows that came or left. A tag without rows is forgotten: each step has its own."""
        self.chunks.count_rows(tag, n)
        if not self.chunks.rows_of(tag) and tag in self._tag_codes:
            del self.tags[self._tag_codes.pop(tag)]

    @property
    def has_groups(self) -> bool:
        return bool(self.group_stages)

    def progress(self, stage: str, tag: str | None = None) -> Progress:
        return self.controller(stage).progress(tag)

    def finished(self, stage: str, tag: str) -> list[int]:
        """Return the groups of `tag` that `stage` has consumed whole, those with the lowest number first."""
        c, rows = self.controller(stage), self.rows
        slots = np.flatnonzero((rows.state == LIVE) & (rows.tag == self.tag_code(tag)))
        groups, place, here = np.unique(rows.group[slots], return_inverse=True, return_counts=True)
        waiting = np.bincount(place.reshape(-1), (rows.pending[slots] & c.bit) != 0, len(groups))
        found: list[int] = groups[waiting == 0].tolist()
        if not self.group_stages:
            return found
        counts = dict(zip(groups.tolist(), here.tolist()))
        return [g for g in found if counts[g] == self.groups[g].size - self.groups[g].dropped - self.groups[g].left]

    def state(self, now: float) -> DockState:
        return DockState(
            rows=len(self.slot_of),
            bytes=self.chunks.nbytes,
            written=self.chunks.written,
            version=self.version,
            stages={c.stage.name: self._counts(c, now) for c in self.controllers},
            dropped=self.dropped,
            expired=self.expired,
            stale=self.stale,
            ended=self.ended,
            lost=self.lost,
            reissued=self.reissued,
            tags={tag: held.rows for tag, held in self.chunks.held().items() if held.rows},
        )

    def _counts(self, c: Controller, now: float) -> StageCounts:
        if not c.ready.count:
            return StageCounts(ready=0, leased=c.leased, done=c.done)
        head = c.slots(c.ready.first(1))
        # the clock may have restarted with the machine since the rows arrived
        oldest_s = max(0.0, float(now - self.rows.born[head].min())) if len(head) else 0.0
        return StageCounts(c.ready_rows(), c.leased, c.done, c.pending.of(None), oldest_s=oldest_s)

    # -- choosing and leasing ----------------------------------------------------------------------------------------

    def _choose(self, c: Controller, want: Want) -> Ints | None:
        """Take units for `want` out of the ready queue; None when too few are ready."""
        chosen, dull = c.choose(want)
        if len(dull):
            life.end(self, c.slots(dull))
        if chosen is not None:
            c.ready.take_out(chosen)
        return chosen

    def _take_part(self, c: Controller, want: Want, columns: tuple[str, ...], now: float, owner: bytes) -> Grant | None:
        """Serve ranks: the first rank to ask decides for all; the others find their part already leased."""
        if not self._waiting_parts(c, want.rank):
            units = self._choose(c, want)
            if units is None:
                return None
            for rank, part in enumerate(sampler.balance(c.describe(units).tokens, want.ranks)):
                self._waiting_parts(c, rank).append(self._lease(c, c.slots(units[part]), columns, now))
        lease = c.parts[want.rank].pop(0)
        held = self.leases[lease]
        held.deadline, held.owner = now + self.lease_s, owner
        return self._grant(lease)

    def _waiting_parts(self, c: Controller, rank: int) -> list[int]:
        """Return leases decided for a rank that it has not fetched; expired ones are discarded."""
        c.parts[rank] = [lease for lease in c.parts.get(rank, ()) if lease in self.leases]
        return c.parts[rank]

    def _lease(self, c: Controller, slots: Ints, columns: tuple[str, ...], now: float, owner: bytes = b"") -> int:
        where = span(slots)
        if isinstance(where, slice):
            held = self.rows.leased[where]  # a view; `leased[where] |= bit` would copy it onto itself once more
            held |= c.bit
        else:
            self.rows.leased[where] |= c.bit
        c.leased += len(slots)
        c.held.add(self.rows.tag[where], 1)
        return self.leases.add(HeldLease(c.index, slots, now + self.lease_s, columns, owner, now, where))

    def _replay(self, c: Controller, want: Want, columns: tuple[str, ...], now: float, owner: bytes) -> Grant | None:
        """Grant a lease on kept rows, drawn evenly and with repetition."""
        pool = life.replayed(self, c)
        if not len(pool):
            return None
        places = np.random.default_rng([want.seed, want.rank]).integers(0, len(pool), want.rows or 1)
        slots = pool[places]
        lease = HeldLease(c.index, slots, now + self.lease_s, columns, owner, now, slots, is_replay=True)
        return self._grant(self.leases.add(lease))

    def _second(self, c: Controller, columns: tuple[str, ...], now: float, owner: bytes) -> Grant | None:
        """Grant a second lease on the rows of a straggler, if there is one."""
        limit_s = c.pace.limit_s
        first = None if limit_s is None else latest(self.leases.at(c.index), limit_s, now, owner)
        if first is None or (self.rows.state[self.leases[first].slots] != LIVE).any():
            return None
        held = self.leases[first]
        until = now + self.lease_s
        held.twin = self.leases.add(HeldLease(c.index, held.slots, until, columns, owner, now, held.where, first))
        self.reissued += 1
        return self._grant(held.twin)

    def _grant(self, key: int) -> Grant:
        lease, rows = self.leases[key], self.rows
        slots = lease.where
        assert slots is not None
        pieces = []
        for part in self.columns.parts_with(lease.columns) if len(lease.slots) else ():
            piece = _piece(part, rows.chunk[part, slots], rows.place[part, slots])
            if piece is not None:
                pieces.append(piece)
        return Grant(
            lease=key,
            deadline=lease.deadline,
            columns=lease.columns,
            rows=len(lease.slots),
            meta={
                ID: rows.id[slots],
                GROUP: rows.group[slots],
                VERSION: rows.version[slots],
                LENGTH: rows.length[slots],
            },
            pieces=pieces,
        )

    def _held_lease(self, key: int, now: float) -> HeldLease:
        self.expire(now)
        if key not in self.leases:
            raise LeaseExpired(
                "this lease is no longer held: its rows were given to another",
                "discard the work and take again; renew() during long work, or raise lease_s",
            )
        return self.leases[key]

    def _give_back(self, lease: HeldLease) -> None:
        if lease.twin:  # another lease holds the rows, too
            self.leases[lease.twin].twin = 0
            return
        if lease.is_replay:
            life.keep(self, np.empty(0, np.int64))
            return
        c, rows, slots = self.controllers[lease.stage], self.rows, lease.slots
        rows.leased[slots] &= ~c.bit
        c.leased -= len(slots)
        live = rows.state[slots] == LIVE
        ending, slots = slots[~live], slots[live]
        c.held.add(rows.tag[slots], -1)
        life.free_rows(self, ending[rows.leased[ending] == 0])
        if c.is_group:
            for key in dict.fromkeys(rows.group[slots].tolist()):
                life.queue_if_complete(self, c, key, front=True)
        else:
            c.ready.add(slots, front=True)
        self.touched.add(c.stage.name)
        again.sift(self, slots)


def _piece(part: int, chunks: Ints, places: npt.NDArray[np.int32]) -> Piece | None:
    """Return the rows' pieces of a part; None where no row has it."""
    first, raw = int(chunks[0]), chunks.tobytes()
    if raw[8:] == raw[:-8]:  # one chunk, or none
        if first < 0:
            return None
        if is_range(places):
            return Piece(part, first, int(places[0]))
    return Piece(part, chunks.copy(), places.copy())
