"""The ledger: which sample is where and who may have it. Metadata only, no input or output, no clock of its own.

It is a state machine: every method is one atomic step, the caller gives the time and serialises the calls. The same
class serves the in-process dock and the ledger process. It promises: a stage consumes a row once; a row is leased to
one consumer of a stage at a time; a group stage gets groups whole; what no stage needs any more is freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from tidemill.dock import again, sampler
from tidemill.dock.api import DockState, LeaseExpired, StageCounts, Want
from tidemill.dock.chunks import Chunk, Chunks
from tidemill.dock.controller import Controller, make_controllers
from tidemill.dock.groups import Groups
from tidemill.dock.records import META, NO_VERSION, Grant, HeldLease, Ints, Written
from tidemill.dock.table import ENDING, LIVE, EndedIds, Rows
from tidemill.errors import DockError, did_you_mean
from tidemill.graph import Stage

EPOCH_SHIFT = 40  # lease ids are epoch << 40 | serial: one from before a restart is never mistaken for a new one
REMEMBERED_COMMITS = 1 << 13  # a commit repeated because its answer was lost is recognised this long
NONE = np.empty(0, np.int64)


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
        self.watch = watch  # the column whose values samplers may compare
        self.epoch = epoch
        self.version = 0
        self.touched: set[str] = set()  # stages that got ready rows since the caller last looked
        self.effects: list[tuple[Any, ...]] | None = None  # what happened, for a journal; None: nobody keeps one
        self.dropped = self.expired = self.stale = self.ended = self.lost = 0
        self.missing: list[int] = []  # ids whose bytes are lost: only their producer can bring them back
        self.gone: set[int] = set()  # chunks whose bytes are lost
        self.controllers, self._bits = make_controllers(stages, self)
        self._masks: dict[tuple[str, ...], np.uint64] = {}
        self._parts_cache: dict[tuple[str, ...], list[int]] = {}
        self.highest_id = -(1 << 63)
        self._part_columns = [set[str]()] + [set(stage.writes) for stage in stages]  # part 0 grows with what is put
        self._part_readers = self._readers()
        self.chunks = Chunks(max_rows, max_bytes)
        self.rows = Rows(parts=len(stages) + 1)
        self._by_name = {c.stage.name: c for c in self.controllers}
        self.group_stages = [c for c in self.controllers if c.is_group]
        self.group_bits = np.uint64(sum(int(c.bit) for c in self.group_stages))
        self.all_stages = np.uint64((1 << len(stages)) - 1)
        self.groups = Groups(len(self.group_stages), group_size)
        self.slot_of: dict[int, int] = {}
        self.ended_ids = EndedIds()
        self._tag_codes: dict[str, int] = {"": 0}
        self.tags = [""]
        self._leases: dict[int, HeldLease] = {}
        self.committed: dict[int, None] = {}
        self.serial = 0
        self._lease_serial = 0
        self._no_expiry_before = float("inf")  # spares most calls the look at every lease

    # -- producing ---------------------------------------------------------------------------------------------------

    def put(self, ids: Ints, group: Ints, sizes: Ints | None, what: Written, tag: str, now: float) -> int:
        """Enter rows; those known already are left as they are. Returns how many were new."""
        fresh = self._fresh(ids.tolist())
        n = len(fresh)
        if n == 0:
            self.chunks.add(what.chunk, Chunk(what.columns, what.nbytes, 0, tag))
            return 0
        if self.group_stages:
            keys, known = group[fresh].tolist(), None if sizes is None else sizes[fresh].tolist()
            self.groups.check_room(keys, known)
        if self.effects is not None:
            self.effects.append(("put", ids, group, sizes, what, tag, now))
        slots = self._enter(ids[fresh], group[fresh], what, fresh, tag, now)
        if self.group_stages:
            for i, slot in enumerate(slots.tolist()):
                self.groups.join(keys[i], slot, known[i] if known else None)
        written = self._mask(what.columns)
        for c in self.controllers:
            if written & c.reads == c.reads:
                self.make_ready(c, slots)
        again.sift(self, slots)
        return n

    def advance(self, version: int) -> None:
        """The weights are now `version`; what got too old meanwhile and is not in work is dropped or queued again."""
        self.version = version
        if self.effects is not None:
            self.effects.append(("advance", version))
        again.sift(self, self.rows.live())

    def drop(self, ids: Iterable[int]) -> int:
        """End rows wherever they are. Returns how many were still here."""
        slots = self.slots_of(ids)
        self.end(slots)
        return len(slots)

    # -- consuming ---------------------------------------------------------------------------------------------------

    def take(self, stage: str, want: Want, now: float) -> Grant | None:
        """A lease on what `want` asks for, or None when not enough is ready."""
        c = self.controller(stage)
        sampler.check(want)
        if c.is_group and self.groups.size is None and want.group_size is not None:
            for group in self.groups.learn_size(want.group_size):
                for other in self.group_stages:
                    self._queue_if_complete(other, group.key)
        if c.is_group and self.groups.has_unsized:
            raise DockError(
                f"stage {stage!r} takes whole groups, but nobody said how many rows a group has",
                "put a column `group_size`, or give group_size to the dock or to the want",
            )
        columns = c.wanted(want)
        if want.ranks > 1:
            return self._take_part(c, want, columns, now)
        units = self._choose(c, want)
        return None if units is None else self._grant(self._lease(c, c.slots(units), columns, now))

    def commit(self, lease: int, what: Written, drop: Iterable[int], now: float) -> None:
        """Write the outputs and consume the rows, in one step. Refused when the lease is no longer held."""
        if lease in self.committed:  # the answer to the first was lost on its way
            self.chunks.add(what.chunk, Chunk((), 0, 0, ""))
            return
        held = self._held_lease(lease, now)
        c, slots = self.controllers[held.stage], held.slots
        c.check_outputs(what)
        del self._leases[lease]
        c.leased -= len(slots)
        self.rows.leased[slots] &= ~c.bit
        keep = self.rows.state[slots] == LIVE
        ended = set(drop)
        if ended:
            keep &= np.array([i not in ended for i in self.rows.id[slots].tolist()], bool)
        places = np.flatnonzero(keep)
        if self.effects is not None:
            ids = self.rows.id[slots]
            self.effects.append(("commit", lease, c.stage.name, ids[places], places, what, ids[~keep]))
        self.finish(c, lease, slots[places], places, what, slots[~keep])
        again.sift(self, slots[places])

    def renew(self, lease: int, now: float) -> float:
        held = self._held_lease(lease, now)
        held.deadline = now + self.lease_s
        return held.deadline

    def lease_span(self) -> tuple[int, int]:
        """Serial numbers of the oldest lease held (or the next one to come) and of the last one given."""
        last = self._lease_serial
        oldest = min(self._leases) & ((1 << EPOCH_SHIFT) - 1) if self._leases else last + 1
        return oldest, last

    def lease_rows(self, lease: int, now: float) -> int:
        """How many rows a lease holds; refused when it is no longer held."""
        return len(self._held_lease(lease, now).slots)

    def abandon(self, lease: int) -> None:
        """Give the rows back. A lease that is gone already has given them back."""
        if lease in self._leases:
            self._give_back(self._leases.pop(lease))

    def expire(self, now: float) -> int:
        """Give back what every overdue lease holds. Returns how many there were."""
        if now < self._no_expiry_before:
            return 0
        overdue = [key for key, lease in self._leases.items() if lease.deadline <= now]
        for key in overdue:
            self._give_back(self._leases.pop(key))
        self.expired += len(overdue)
        self._no_expiry_before = min((lease.deadline for lease in self._leases.values()), default=float("inf"))
        return len(overdue)

    def next_deadline(self) -> float | None:
        return min((lease.deadline for lease in self._leases.values()), default=None)

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
            self._tag_codes[tag] = len(self.tags)
            self.tags.append(tag)

    @property
    def source_columns(self) -> set[str]:
        return self._part_columns[0]

    @property
    def has_groups(self) -> bool:
        return bool(self.group_stages)

    def state(self, now: float) -> DockState:
        return DockState(
            rows=len(self.slot_of),
            bytes=self.chunks.nbytes,
            version=self.version,
            stages={c.stage.name: self._counts(c, now) for c in self.controllers},
            dropped=self.dropped,
            expired=self.expired,
            stale=self.stale,
            ended=self.ended,
            lost=self.lost,
            tags={tag: held.rows for tag, held in self.chunks.held().items() if held.rows},
        )

    def _counts(self, c: Controller, now: float) -> StageCounts:
        head = c.slots(c.ready.first(1))
        oldest_s = float(now - self.rows.born[head].min()) if len(head) else 0.0
        return StageCounts(ready=c.ready_rows(), leased=c.leased, done=c.done, oldest_s=oldest_s)

    # -- choosing and leasing ----------------------------------------------------------------------------------------

    def _choose(self, c: Controller, want: Want) -> Ints | None:
        """Units for `want`, taken out of the ready queue; None when too few are ready."""
        chosen, dull = c.choose(want)
        if len(dull):
            self.end(c.slots(dull))
        if chosen is not None:
            c.ready.remove(chosen)
        return chosen

    def _take_part(self, c: Controller, want: Want, columns: tuple[str, ...], now: float) -> Grant | None:
        """Rank-aware: the first rank to ask decides for all; the others find their part waiting, already leased."""
        waiting = c.parts.setdefault(want.rank, [])
        while waiting and waiting[0] not in self._leases:  # ran out before its rank came
            waiting.pop(0)
        if not waiting:
            units = self._choose(c, want)
            if units is None:
                return None
            for rank, part in enumerate(sampler.balance(c.describe(units).tokens, want.ranks)):
                c.parts.setdefault(rank, []).append(self._lease(c, c.slots(units[part]), columns, now))
        lease = waiting.pop(0)
        self._leases[lease].deadline = now + self.lease_s
        return self._grant(lease)

    def _lease(self, c: Controller, slots: Ints, columns: tuple[str, ...], now: float) -> int:
        self._lease_serial += 1
        key = self.epoch << EPOCH_SHIFT | self._lease_serial
        self._no_expiry_before = min(self._no_expiry_before, now + self.lease_s)
        self._leases[key] = HeldLease(c.index, slots, now + self.lease_s, columns)
        self.rows.leased[slots] |= c.bit
        c.leased += len(slots)
        return key

    def _grant(self, key: int) -> Grant:
        lease, rows = self._leases[key], self.rows
        slots = lease.slots
        pieces = []
        for part in self._parts_with(lease.columns):
            chunks = rows.chunk[part, slots]
            if (chunks >= 0).any():
                pieces.append((part, chunks, rows.place[part, slots]))
        return Grant(
            lease=key,
            deadline=lease.deadline,
            columns=lease.columns,
            ids=rows.id[slots],
            group=rows.group[slots],
            version=rows.version[slots],
            length=rows.length[slots],
            pieces=pieces,
        )

    def _held_lease(self, key: int, now: float) -> HeldLease:
        held = self._leases.get(key)
        if held is not None and held.deadline <= now:
            self.expire(now)
            held = None
        if held is None:
            raise LeaseExpired(
                "this lease is no longer held: its rows were given out again",
                "discard the work and take again; renew() during long work, or raise lease_s",
            )
        return held

    def _give_back(self, lease: HeldLease) -> None:
        c, rows, slots = self.controllers[lease.stage], self.rows, lease.slots
        c.leased -= len(slots)
        rows.leased[slots] &= ~c.bit
        live = rows.state[slots] == LIVE
        ending, slots = slots[~live], slots[live]
        self.free_rows(ending[rows.leased[ending] == 0])
        if c.is_group:
            for key in dict.fromkeys(rows.group[slots].tolist()):
                self._queue_if_complete(c, key, front=True)
        else:
            c.ready.add(slots, front=True)
        self.touched.add(c.stage.name)
        again.sift(self, slots)

    # -- what a step does to rows ------------------------------------------------------------------------------------

    def _fresh(self, keys: list[int]) -> Ints:
        """Positions of ids never seen before; an id twice in one put counts once."""
        low, high = min(keys, default=0), max(keys, default=0)
        if low > self.highest_id and len(set(keys)) == len(keys):  # the usual case: producers count upwards
            self.highest_id = high
            return np.arange(len(keys))
        self.highest_id = max(self.highest_id, high)
        known, ended = self.slot_of, self.ended_ids
        fresh: dict[int, int] = {}
        for i, key in enumerate(keys):
            if key not in known and key not in ended:
                fresh.setdefault(key, i)
        return np.fromiter(fresh.values(), np.int64, len(fresh))

    def _enter(self, ids: Ints, group: Ints, what: Written, places: Ints, tag: str, now: float) -> Ints:
        rows, n = self.rows, len(ids)
        slots = rows.allocate(n)
        for c in self.controllers:
            c.ready.ensure(len(rows.id))
        self.slot_of.update(zip(ids.tolist(), slots.tolist()))
        self.learn_tag(tag)
        rows.id[slots], rows.group[slots], rows.born[slots] = ids, group, now
        rows.version[slots] = NO_VERSION if what.version is None else what.version[places]
        rows.length[slots] = 0 if what.length is None else what.length[places]
        rows.score[slots] = np.nan if what.score is None else what.score[places]
        rows.tag[slots], rows.state[slots] = self._tag_codes[tag], LIVE
        rows.serial[slots] = np.arange(self.serial, self.serial + n)
        self.serial += n
        self.learn_source(what.columns)
        rows.written[slots] = rows.source[slots] = self._mask(what.columns)
        rows.pending[slots], rows.leased[slots] = self.all_stages, 0
        rows.chunk[:, slots] = -1
        self._place(0, slots, what, places, tag)
        self.chunks.count_rows(tag, n)
        return slots

    def finish(self, c: Controller, lease: int, kept: Ints, places: Ints, what: Written, gone: Ints) -> None:
        """The one step of a commit: `kept` rows (at `places` in the outputs) are consumed, `gone` ones end."""
        rows = self.rows
        self.committed[lease] = None
        if len(self.committed) > REMEMBERED_COMMITS:
            del self.committed[next(iter(self.committed))]
        c.done += len(kept)
        if c.is_group:
            for key in rows.group[kept].tolist():
                self.groups[key].ready[c.group_index] -= 1
                self.groups[key].consumed[c.group_index] += 1
        self.end(gone)
        self.free_rows(gone[(rows.state[gone] == ENDING) & (rows.leased[gone] == 0)])
        rows.pending[kept] &= ~c.bit
        if what.version is not None:
            rows.version[kept] = what.version[places]
        if what.length is not None:
            rows.length[kept] = what.length[places]
        if what.score is not None:
            rows.score[kept] = what.score[places]
        tag = self.tags[rows.tag[kept[0]]] if len(kept) else ""
        self._place(c.index + 1, kept, what, places, tag)
        self._spread_news(kept, what)
        self._let_go(kept)

    def _place(self, part: int, slots: Ints, what: Written, places: Ints, tag: str) -> None:
        if what.chunk >= 0:
            self.chunks.add(what.chunk, Chunk(what.columns, what.nbytes, len(slots), tag))
            self.rows.chunk[part, slots], self.rows.place[part, slots] = what.chunk, places

    def _spread_news(self, slots: Ints, what: Written) -> None:
        """Columns were written: stages that waited for them get their rows."""
        if not len(slots):
            return
        rows, news = self.rows, self._mask(what.columns)
        before = rows.written[slots]
        rows.written[slots] = now = before | news
        for c in self.controllers:
            if what.version is not None:
                c.ready.rekey(self.units(c, slots))
            if news & c.reads:
                became = (now & c.reads == c.reads) & (before & c.reads != c.reads)
                self.make_ready(c, slots[became & (rows.pending[slots] & c.bit != 0)])

    def make_ready(self, c: Controller, slots: Ints) -> None:
        if not len(slots):
            return
        if not c.is_group:
            c.ready.add(slots)
            self.touched.add(c.stage.name)
            return
        for key in self.rows.group[slots].tolist():
            self.groups[key].ready[c.group_index] += 1
            self._queue_if_complete(c, key)
        if self.groups.has_unsized:  # who waits is told that it waits for nothing
            self.touched.add(c.stage.name)

    def _queue_if_complete(self, c: Controller, key: int, front: bool = False) -> None:
        group = self.groups[key]
        handle = np.array([group.handle])
        if group.is_complete(c.group_index) and not c.ready.has(handle)[0]:
            c.ready.add(handle, front)
            self.touched.add(c.stage.name)

    def _let_go(self, slots: Ints) -> None:
        """Free the parts that no pending stage reads, and the rows that went through all stages."""
        rows = self.rows
        is_through = (rows.pending[slots] | rows.leased[slots]) == 0
        self.free_rows(slots[is_through])
        rest = slots[~is_through]
        if not len(rest):
            return
        first = 1 if self.stale_policy == "requeue" else 0  # what is made again is made from part 0
        for part in range(first, len(rows.chunk)):
            self.unref(part, rest[(rows.pending[rest] & self._part_readers[part]) == 0])

    def unref(self, part: int, slots: Ints) -> None:
        slots = slots[self.rows.chunk[part, slots] >= 0]
        if len(slots):
            self.chunks.unref(self.rows.chunk[part, slots].tolist())
            self.rows.chunk[part, slots] = -1

    def end(self, slots: Ints) -> None:
        """Rows stop here: dropped by a consumer, a sampler or staleness. Leased ones are freed as their leases end."""
        rows = self.rows
        slots = slots[rows.state[slots] == LIVE]
        if not len(slots):
            return
        self.dropped += len(slots)
        if self.effects is not None:
            self.effects.append(("end", rows.id[slots]))
        rows.state[slots] = ENDING
        for c in self.controllers:
            if not c.is_group:
                c.ready.remove(slots)
        if self.group_stages:
            self._leave_groups(slots)
        self.free_rows(slots[rows.leased[slots] == 0])

    def _leave_groups(self, slots: Ints) -> None:
        """Dropped rows are no longer expected: what is left of their groups may be complete now, or nothing."""
        rows = self.rows
        touched = {}
        for slot in slots.tolist():
            group = self.groups[int(rows.group[slot])]
            touched[group.key] = group
            for c in self.group_stages:
                if not rows.pending[slot] & c.bit:
                    group.consumed[c.group_index] -= 1
                elif rows.written[slot] & c.reads == c.reads:
                    group.ready[c.group_index] -= 1
            self.groups.left(group.key, slot, dropped=True)
        for group in touched.values():
            for c in self.group_stages:
                if not group.is_complete(c.group_index):
                    c.ready.remove(np.array([group.handle]))
                elif not (rows.leased[group.members] & c.bit).any():
                    self._queue_if_complete(c, group.key)

    def free_rows(self, slots: Ints) -> None:
        if not len(slots):
            return
        rows = self.rows
        self.ended_ids.add(rows.id[slots])
        self.ended += len(slots)
        if self.group_stages:
            for slot in slots[rows.state[slots] == LIVE].tolist():
                self.groups.left(int(rows.group[slot]), slot, dropped=False)
        self.clear(slots)

    def clear(self, slots: Ints) -> None:
        """Take rows out of the table, whatever the reason."""
        rows = self.rows
        held = rows.chunk[:, slots]
        self.chunks.unref(held[held >= 0].tolist())
        for i in rows.id[slots].tolist():
            del self.slot_of[i]
        for tag, n in Counter(rows.tag[slots].tolist()).items():
            self.chunks.count_rows(self.tags[tag], -n)
        rows.release(slots)

    def units(self, c: Controller, slots: Ints) -> Ints:
        if not c.is_group:
            return slots
        keys = dict.fromkeys(self.rows.group[slots].tolist())
        return np.array([self.groups[key].handle for key in keys], np.int64)

    def _mask(self, columns: tuple[str, ...]) -> np.uint64:
        if columns not in self._masks:
            bits = sum(self._bits.get(column, 0) for column in {*columns, *META[:2]})
            self._masks[columns] = np.uint64(bits)
        return self._masks[columns]

    def _parts_with(self, columns: tuple[str, ...]) -> list[int]:
        """Parts that may hold some of these columns."""
        if columns not in self._parts_cache:
            parts = [part for part, names in enumerate(self._part_columns) if not names.isdisjoint(columns)]
            self._parts_cache[columns] = parts
        return self._parts_cache[columns]

    def learn_source(self, columns: tuple[str, ...]) -> None:
        if not self._part_columns[0].issuperset(columns):
            self._part_columns[0].update(columns)
            self._parts_cache.clear()
            self._part_readers = self._readers()

    def _readers(self) -> list[np.uint64]:
        """By part, the stages that read something of it."""
        return [
            np.uint64(sum(int(c.bit) for c in self.controllers if not names.isdisjoint(c.stage.reads)))
            for names in self._part_columns
        ]
