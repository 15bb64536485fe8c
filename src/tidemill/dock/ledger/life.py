"""The life of a row: added, made ready, consumed, ended, freed. Each function is one thing that a step of the ledger
does to rows of its table; none decides anything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from tidemill.dock.ledger.controller import Controller
from tidemill.dock.ledger.credit import CreditedChunk
from tidemill.dock.ledger.ready import EMPTY
from tidemill.dock.ledger.records import NO_VERSION, Ints, Written
from tidemill.dock.ledger.table import ENDING, LIVE, Rows, same

if TYPE_CHECKING:
    from tidemill.dock.ledger.ledger import Ledger


def fresh(ledger: Ledger, keys: list[int]) -> Ints:
    """Return positions of new ids; an id that is twice in one put counts once."""
    low, high = min(keys, default=0), max(keys, default=0)
    if low > ledger.highest_id and len(set(keys)) == len(keys):  # the usual case: producers count upwards
        ledger.highest_id = high
        return np.arange(len(keys))
    ledger.highest_id = max(ledger.highest_id, high)
    known, ended = ledger.slot_of, ledger.ended_ids
    first: dict[int, int] = {}
    for i, key in enumerate(keys):
        if key not in known and key not in ended:
            first.setdefault(key, i)
    return np.fromiter(first.values(), np.int64, len(first))


def enter(ledger: Ledger, ids: Ints, group: Ints, what: Written, places: Ints, tag: str, now: float) -> Ints:
    rows, n = ledger.rows, len(ids)
    slots = rows.allocate(n)
    for c in ledger.controllers:
        c.ready.ensure(len(rows.id))
    ledger.slot_of.update(zip(ids.tolist(), slots.tolist()))
    ledger.learn_tag(tag)
    rows.id[slots], rows.group[slots], rows.born[slots] = ids, group, now
    rows.version[slots] = NO_VERSION if what.version is None else what.version[places]
    rows.length[slots] = 0 if what.length is None else what.length[places]
    rows.score[slots] = np.nan if what.score is None else what.score[places]
    rows.tag[slots], rows.state[slots] = ledger.tag_code(tag), LIVE
    rows.serial[slots] = np.arange(ledger.serial, ledger.serial + n)
    ledger.serial += n
    ledger.columns.learn_source(what.columns)
    rows.written[slots] = rows.source[slots] = ledger.columns.mask(what.columns)
    rows.pending[slots], rows.leased[slots] = ledger.all_stages, 0
    code = ledger.tag_code(tag)
    for c in ledger.controllers:
        c.pending.change(code, n)
    rows.chunk[:, slots] = -1
    _place(ledger, 0, Rows.at(slots), what, places, tag)
    ledger.count_rows(tag, n)
    return slots


def finish(ledger: Ledger, c: Controller, lease: int, kept: Rows, places: Ints, what: Written, gone: Ints) -> None:
    """Carry out a commit: `kept` rows (at `places` in the outputs) are consumed, `gone` ones end."""
    rows, where = ledger.rows, kept.where
    ledger.committed.add(lease)
    c.done += len(kept.slots)
    if c.is_group:
        for key, n in Counter(rows.group[where].tolist()).items():
            group = ledger.groups[key]
            group.ready[c.group_index] -= n
            group.consumed[c.group_index] += n
    if len(gone):
        end(ledger, gone)
        free_rows(ledger, gone[(rows.state[gone] == ENDING) & (rows.leased[gone] == 0)])
    tags = rows.tag[where]
    rows.pending[where] &= ~c.bit
    c.pending.add(tags, -1)
    if what.version is not None:
        rows.version[where] = what.version[places]
    if what.length is not None:
        rows.length[where] = what.length[places]
    if what.score is not None:
        rows.score[where] = what.score[places]
    _place(ledger, c.index + 1, kept, what, places, ledger.tags[int(tags[0])] if len(tags) else "")
    if len(tags):
        _spread_news(ledger, kept, what)
        _let_go(ledger, kept)


def count(ledger: Ledger, ids: Ints, what: Written) -> None:
    """Keep a commit's counts, also of dropped rows. Counts of rows that ended meanwhile are final at once."""
    if what.counts is None:
        return
    ledger.counts.note(ids, what.counts)
    here, state = ledger.slot_of, ledger.rows.state
    slots = [here.get(i, -1) for i in ids.tolist()]
    if -1 in slots or (state[slots] != LIVE).any():
        ledger.counts.leave(ids[[slot < 0 or bool(state[slot] != LIVE) for slot in slots]])


def _place(ledger: Ledger, part: int, at: Rows, what: Written, places: Ints, tag: str) -> None:
    if what.chunk >= 0:
        ledger.chunks.add(what.chunk, CreditedChunk(what.columns, what.nbytes, len(at.slots), tag))
        ledger.rows.chunk[part, at.where], ledger.rows.place[part, at.where] = what.chunk, places


def _spread_news(ledger: Ledger, at: Rows, what: Written) -> None:
    """Make rows ready for stages whose columns are now written."""
    rows, where, slots = ledger.rows, at.where, at.slots
    news, readers = ledger.columns.news(what.columns)
    before = rows.written[where].copy()  # a view would change
    rows.written[where] |= news
    if what.version is not None:
        for c in ledger.controllers:
            if c.ready.has_orders:
                c.ready.rekey(units(ledger, c, slots))
    if not readers:
        return
    old, pending = same(before), same(rows.pending[where])
    if old is not None and pending is not None:  # the usual case: all rows alike
        for c in readers:
            reads = int(c.reads)
            if pending & int(c.bit) and old & reads != reads and (old | int(news)) & reads == reads:
                make_ready(ledger, c, slots)
        return
    now = before | news
    for c in readers:
        became = (now & c.reads == c.reads) & (before & c.reads != c.reads)
        make_ready(ledger, c, slots[became & (rows.pending[slots] & c.bit != 0)])


def make_ready(ledger: Ledger, c: Controller, slots: Ints) -> None:
    if not len(slots):
        return
    if not c.is_group:
        c.ready.add(slots)
        ledger.touched.add(c.stage.name)
        return
    keys = ledger.rows.group[slots].tolist()
    came, complete = Counter(keys), []
    for key in reversed(dict.fromkeys(reversed(keys))):  # a group is complete with its last row
        group = ledger.groups[key]
        group.ready[c.group_index] += came[key]
        if group.is_complete(c.group_index) and not c.ready.has_one(group.handle):
            complete.append(group.handle)
    if complete:
        c.ready.add(np.array(complete, np.int64))
        ledger.touched.add(c.stage.name)
    if ledger.groups.has_unsized:  # waiting consumers get an error: the group can never come
        ledger.touched.add(c.stage.name)


def queue_if_complete(ledger: Ledger, c: Controller, key: int, front: bool = False) -> None:
    group = ledger.groups[key]
    if group.is_complete(c.group_index) and not c.ready.has_one(group.handle):
        c.ready.add(np.array([group.handle]), front)
        ledger.touched.add(c.stage.name)


def _let_go(ledger: Ledger, at: Rows) -> None:
    """Free the parts that no pending stage reads, and rows that have passed all stages."""
    rows, rest = ledger.rows, at
    wanted = rows.pending[at.where] | rows.leased[at.where]
    if not wanted.all():
        is_through = wanted == 0
        through = at.slots[is_through]
        rest = Rows.at(at.slots[~is_through])
        if ledger.keeps:
            keep(ledger, through)
        else:
            free_rows(ledger, through)
    elif ledger.keeps:
        keep(ledger, EMPTY)
    if not len(rest.slots):
        return
    first = 1 if ledger.stale_policy == "requeue" else 0  # rows that are made again start from part 0
    pending = same(rows.pending[rest.where])
    for part in range(first, len(rows.chunk)):
        readers = ledger.columns.readers[part]
        if pending is None:
            unref(ledger, part, rest.slots[(rows.pending[rest.slots] & readers) == 0])
        elif not pending & int(readers):
            _unref_rows(ledger, part, rest)


def _unref_rows(ledger: Ledger, part: int, at: Rows) -> None:
    """Like `unref`, for rows whose part is mostly in one chunk, or in none."""
    key = same(ledger.rows.chunk[part, at.where])
    if key is None:
        unref(ledger, part, at.slots)
    elif key >= 0:
        ledger.chunks.release(key, len(at.slots))
        ledger.rows.chunk[part, at.where] = -1


def keep(ledger: Ledger, slots: Ints) -> None:
    """Keep rows that all stages are through with, and free the oldest beyond those that a stage reads again."""
    kept = np.concatenate([ledger.kept, slots])
    kept = kept[np.argsort(ledger.rows.id[kept], kind="stable")]
    spare = kept[: max(0, len(kept) - ledger.keeps)]
    again = [lease.slots for c in ledger.controllers for _, lease in ledger.leases.at(c.index) if lease.is_replay]
    spare = spare[~np.isin(spare, np.concatenate([np.empty(0, np.int64), *again]))]
    ledger.kept = kept[~np.isin(kept, spare)] if len(spare) else kept
    ledger.counts.leave(ledger.rows.id[slots])
    free_rows(ledger, spare)


def replayed(ledger: Ledger, c: Controller) -> Ints:
    """Return the newest rows that all other stages are through with, those that the stage itself holds included: so
    what is drawn does not tell when it commits."""
    own = [lease.slots for _, lease in ledger.leases.at(c.index) if not lease.is_replay]
    held = np.unique(np.concatenate([np.empty(0, np.int64), *own]))
    pool = np.concatenate([ledger.kept, held[ledger.rows.pending[held] == c.bit]])
    return pool[np.argsort(ledger.rows.id[pool])][-ledger.keeps :]


def unref(ledger: Ledger, part: int, slots: Ints) -> None:
    slots = slots[ledger.rows.chunk[part, slots] >= 0]
    if len(slots):
        ledger.chunks.unref(ledger.rows.chunk[part, slots].tolist())
        ledger.rows.chunk[part, slots] = -1


def end(ledger: Ledger, slots: Ints) -> None:
    """End rows that a consumer, a sampler or staleness dropped. Leased ones are freed as their leases end."""
    rows = ledger.rows
    slots = slots[rows.state[slots] == LIVE]
    if not len(slots):
        return
    ledger.dropped += len(slots)
    if ledger.effects is not None:
        ledger.effects.append(("end", rows.id[slots]))
    rows.state[slots] = ENDING
    ledger.counts.leave(rows.id[slots])
    tags, pending, leased = rows.tag[slots], rows.pending[slots], rows.leased[slots]
    for c in ledger.controllers:
        c.pending.add(tags[(pending & c.bit) != 0], -1)
        if c.leased:
            c.held.add(tags[(leased & c.bit) != 0], -1)
        if not c.is_group:
            c.ready.remove(slots)
    if ledger.group_stages:
        _leave_groups(ledger, slots)
    free_rows(ledger, slots[rows.leased[slots] == 0])


def _leave_groups(ledger: Ledger, slots: Ints) -> None:
    """Stop expecting dropped rows: the rest of their groups may now be complete, or empty."""
    rows = ledger.rows
    touched = {}
    for slot in slots.tolist():
        group = ledger.groups[int(rows.group[slot])]
        touched[group.key] = group
        for c in ledger.group_stages:
            if not rows.pending[slot] & c.bit:
                group.consumed[c.group_index] -= 1
            elif rows.written[slot] & c.reads == c.reads:
                group.ready[c.group_index] -= 1
        ledger.groups.left(group.key, slot)
    for group in touched.values():
        for c in ledger.group_stages:
            if not group.is_complete(c.group_index):
                c.ready.remove(np.array([group.handle]))
            elif not (rows.leased[group.members] & c.bit).any():
                queue_if_complete(ledger, c, group.key)


def retag(ledger: Ledger, slots: Ints, tag: str) -> None:
    """Move rows to another tag; the bytes that were written for them stay on the credit of their old one."""
    rows = ledger.rows
    ledger.learn_tag(tag)
    code = ledger.tag_code(tag)
    slots = slots[(rows.state[slots] == LIVE) & (rows.tag[slots] != code)]
    old, pending, leased = rows.tag[slots].copy(), rows.pending[slots], rows.leased[slots]
    rows.tag[slots] = code
    for c in ledger.controllers:
        for counts, is_in in ((c.pending, (pending & c.bit) != 0), (c.held, (leased & c.bit) != 0)):
            counts.add(old[is_in], -1)
            counts.change(code, int(is_in.sum()))
        c.ready.rekey(units(ledger, c, slots))
        ledger.touched.add(c.stage.name)
    ledger.count_rows(tag, len(slots))
    for before, n in Counter(old.tolist()).items():
        ledger.count_rows(ledger.tags[before], -n)


def free_rows(ledger: Ledger, slots: Ints) -> None:
    if not len(slots):
        return
    rows = ledger.rows
    ledger.ended_ids.add(rows.id[slots])
    ledger.counts.leave(rows.id[slots])
    ledger.ended += len(slots)
    if ledger.group_stages:
        live = slots[rows.state[slots] == LIVE]
        ledger.groups.passed(rows.group[live].tolist(), live.tolist())
    clear(ledger, slots)


def clear(ledger: Ledger, slots: Ints) -> None:
    """Remove rows from the table, whatever the reason."""
    rows = ledger.rows
    if len(ledger.kept):
        ledger.kept = ledger.kept[~np.isin(ledger.kept, slots)]
    held = rows.chunk[:, slots]
    ledger.chunks.unref(held[held >= 0].tolist())
    for i in rows.id[slots].tolist():
        del ledger.slot_of[i]
    for tag, n in Counter(rows.tag[slots].tolist()).items():
        ledger.count_rows(ledger.tags[tag], -n)
    rows.release(slots)


def units(ledger: Ledger, c: Controller, slots: Ints) -> Ints:
    if not c.is_group:
        return slots
    keys = dict.fromkeys(ledger.rows.group[slots].tolist())
    return np.array([ledger.groups[key].handle for key in keys], np.int64)
