"""Handles rows that became too old, or whose bytes were lost with a warehouse: they are ended, made again, or put
again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.dock.ledger import life
from tidemill.dock.ledger.counts import Counts
from tidemill.dock.ledger.records import NO_VERSION, Ints, Written
from tidemill.dock.ledger.table import LIVE, Rows

if TYPE_CHECKING:
    from tidemill.dock.ledger.ledger import Ledger


def sift(ledger: Ledger, slots: Ints) -> None:
    """Check rows that just changed. Leased ones are checked when their leases end."""
    if (ledger.max_staleness is None and not ledger.gone) or not len(slots):
        return
    rows = ledger.rows
    if not ledger.gone and ledger.max_staleness is not None:
        versions = rows.version[slots]
        is_old = (ledger.version - versions > ledger.max_staleness) & (versions != NO_VERSION)
        if not is_old.any():  # the usual case
            return
    slots = slots[(rows.state[slots] == LIVE) & (rows.leased[slots] == 0)]
    if ledger.gone:
        is_lost = np.isin(rows.chunk[:, slots], np.fromiter(ledger.gone, np.int64)).any(axis=0)
        _recover(ledger, slots[is_lost])
        slots = slots[~is_lost]
    if ledger.max_staleness is not None:
        is_waiting = rows.pending[slots] != 0  # rows that are kept may be of any age
        slots = slots[(rows.version[slots] != NO_VERSION) & is_waiting]
        _refuse_old(ledger, slots[ledger.version - rows.version[slots] > ledger.max_staleness])


def lose(ledger: Ledger, chunks: list[int]) -> None:
    """Handle chunks whose bytes are lost."""
    ledger.gone.update(chunks)
    sift(ledger, ledger.rows.live())


def requeue(ledger: Ledger, slots: Ints) -> None:
    """Reset rows to what they were when they were put: every stage does them again."""
    if not len(slots):
        return
    rows = ledger.rows
    if ledger.effects is not None:
        ledger.effects.append(("requeue", rows.id[slots]))
    ledger.counts.forget(rows.id[slots])
    _leave_queues(ledger, slots)
    for part in range(1, len(rows.chunk)):
        life.unref(ledger, part, slots)
    for c in ledger.controllers:
        c.pending.add(rows.tag[slots[(rows.pending[slots] & c.bit) == 0]], 1)
    rows.written[slots] = rows.source[slots]
    rows.pending[slots], rows.version[slots] = ledger.all_stages, NO_VERSION
    for c in ledger.controllers:
        life.make_ready(ledger, c, slots[(rows.written[slots] & c.reads) == c.reads])


def forget(ledger: Ledger, slots: Ints) -> None:
    """Remove rows as if they had never been put; their producer is told, and may put them again."""
    if not len(slots):
        return
    rows = ledger.rows
    ids = rows.id[slots]
    if ledger.effects is not None:
        ledger.effects.append(("forget", ids))
    ledger.counts.forget(ids)
    ledger.lost += len(ids)
    ledger.missing += ids.tolist()
    _leave_queues(ledger, slots)
    if ledger.has_groups:
        for slot in slots.tolist():
            ledger.groups.forget(int(rows.group[slot]), slot)
    for c in ledger.controllers:
        c.pending.add(rows.tag[slots[(rows.pending[slots] & c.bit) != 0]], -1)
    life.clear(ledger, slots)


def redo(ledger: Ledger, effect: tuple[Any, ...]) -> None:
    """Replay one recorded step after a restart. Its consequences were recorded, too, so nothing is decided here."""
    match effect:
        case ("put", ids, group, sizes, what, tag, now):
            ledger.put(ids, group, sizes, _written(what), tag, now)
        case ("commit", lease, stage, ids, places, what, gone):
            c, written = ledger.controller(stage), _written(what)
            kept, ended = ledger.slots_of(ids.tolist()), ledger.slots_of(gone.tolist())
            c.ready.remove(
                life.units(ledger, c, np.concatenate([kept, ended]))
            )  # leases are not recorded: nobody holds it
            life.count(ledger, _in_order(ids, places, gone), written)
            life.finish(ledger, c, lease, Rows.at(kept), places, written, ended)
        case ("advance", version):
            ledger.version = version
        case ("retag", ids, tag):
            life.retag(ledger, ledger.slots_of(ids.tolist()), tag)
        case ("tell", heard):
            ledger.tell(heard)
        case ("end", ids):
            life.end(ledger, ledger.slots_of(ids.tolist()))
        case ("requeue", ids):
            requeue(ledger, ledger.slots_of(ids.tolist()))
        case ("forget", ids):
            forget(ledger, ledger.slots_of(ids.tolist()))


def _refuse_old(ledger: Ledger, slots: Ints) -> None:
    if not len(slots):
        return
    ledger.stale += len(slots)
    # a row that passed a group stage cannot be made again alone: its group was judged with it
    can_repeat = (ledger.rows.pending[slots] & ledger.group_bits) == ledger.group_bits
    if ledger.stale_policy == "drop":
        can_repeat[:] = False
    life.end(ledger, slots[~can_repeat])
    requeue(ledger, slots[can_repeat])


def _recover(ledger: Ledger, slots: Ints) -> None:
    """Make lost outputs again from the put row while that is here; else the producer must put the row again."""
    if not len(slots):
        return
    rows = ledger.rows
    source = rows.chunk[0, slots]
    has_source = (source >= 0) & ~np.isin(source, np.fromiter(ledger.gone, np.int64))
    is_judged = (rows.pending[slots] & ledger.group_bits) != ledger.group_bits
    ledger.lost += int(np.count_nonzero(is_judged))
    life.end(ledger, slots[is_judged])
    requeue(ledger, slots[~is_judged & has_source])
    forget(ledger, slots[~is_judged & ~has_source])


def _leave_queues(ledger: Ledger, slots: Ints) -> None:
    """Make rows ready for nothing."""
    rows = ledger.rows
    for c in ledger.controllers:
        if not c.is_group:
            c.ready.remove(slots)
            continue
        for slot in slots.tolist():
            group = ledger.groups[int(rows.group[slot])]
            if not rows.pending[slot] & c.bit:
                group.consumed[c.group_index] -= 1
            elif rows.written[slot] & c.reads == c.reads:
                group.ready[c.group_index] -= 1
            c.ready.remove(np.array([group.handle]))


def _written(what: dict[str, Any]) -> Written:
    counts = what.get("counts")
    own = {"columns": tuple(what["columns"]), "counts": None if counts is None else Counts(**counts)}
    return Written(**{**what, **own})


def _in_order(kept: Ints, places: Ints, gone: Ints) -> Ints:
    """Restore the order of a commit's ids: kept ones at their places, the others in between."""
    ids = np.empty(len(kept) + len(gone), np.int64)
    is_kept = np.zeros(len(ids), np.bool_)
    is_kept[places] = True
    ids[is_kept], ids[~is_kept] = kept, gone
    return ids
