"""Converts the ledger's state to plain values and arrays, and back. Leases are left out: their rows come back as
ready."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.dock.ledger.controller import Controller
from tidemill.dock.ledger.credit import CreditedChunk
from tidemill.dock.ledger.ledger import Ledger
from tidemill.dock.ledger.records import Ints
from tidemill.dock.ledger.table import LIVE
from tidemill.errors import DockError

Arrays = dict[str, npt.NDArray[Any]]

ROW_FIELDS = ("id", "group", "version", "length", "score", "tag", "serial", "born", "written", "source", "pending")
FORMAT = 2


def dump(ledger: Ledger) -> tuple[dict[str, Any], Arrays]:
    """Return a record for JSON, and named arrays."""
    rows = ledger.rows
    live = np.flatnonzero(rows.state == LIVE)
    live = live[np.argsort(rows.serial[live], kind="stable")]
    arrays: Arrays = {f"row.{name}": getattr(rows, name)[live] for name in ROW_FIELDS}
    arrays["row.chunk"], arrays["row.place"] = rows.chunk[:, live], rows.place[:, live]
    arrays["committed"] = ledger.committed.dump()
    arrays.update({f"ended.{name}": array for name, array in ledger.ended_ids.dump().items()})
    for c in ledger.controllers:
        arrays[f"order.{c.stage.name}"] = _order(ledger, c)
    chunks = {str(key): [list(c.columns), c.nbytes, c.tag] for key, c in ledger.chunks.items()}
    record = {
        "format": FORMAT,
        "stages": [c.stage.name for c in ledger.controllers],
        "version": ledger.version,
        "columns": sorted(ledger.columns.source),
        "counts": [ledger.dropped, ledger.expired, ledger.stale, ledger.ended],
        "done": [c.done for c in ledger.controllers],
        "turn": [c.turn for c in ledger.controllers],
        "tags": list(ledger.tags.items()),
        "next_tag": ledger.next_tag,
        "serial": ledger.serial,
        "highest_id": ledger.highest_id,
        "groups": ledger.groups.dump(),
        "group_size": ledger.groups.size,
        "chunks": chunks,
        "lost": ledger.lost,
        "counted": ledger.counts.dump(),
        "missing": ledger.missing,
    }
    return record, arrays


def load(ledger: Ledger, record: dict[str, Any], arrays: Arrays) -> None:
    """Load into a fresh ledger of the same stages."""
    names = [c.stage.name for c in ledger.controllers]
    if record.get("format") != FORMAT or record["stages"] != names:
        raise DockError(
            f"this snapshot is of a dock with the stages {record.get('stages')}, not {names}",
            "resume with the algorithm that the run was started with",
        )
    ledger.version = record["version"]
    ledger.dropped, ledger.expired, ledger.stale, ledger.ended = record["counts"]
    ledger.lost, ledger.missing = record.get("lost", 0), list(record.get("missing", ()))
    if "counted" in record:
        ledger.counts.load(record["counted"])
    ledger.groups.size = record["group_size"]
    ledger.groups.load(record["groups"])
    ledger.ended_ids.load({n.removeprefix("ended."): a for n, a in arrays.items() if n.startswith("ended.")})
    ledger.committed.load(arrays["committed"])
    ledger.next_tag = record["next_tag"]
    for code, tag in record["tags"]:
        ledger.load_tag(code, tag)
    ledger.serial, ledger.highest_id = record["serial"], record["highest_id"]
    ledger.columns.learn_source(tuple(record["columns"]))
    slots = _load_rows(ledger, arrays)
    needed = Counter(arrays["row.chunk"].ravel().tolist())
    for key, (columns, nbytes, tag) in record["chunks"].items():
        ledger.chunks.add(int(key), CreditedChunk(tuple(columns), nbytes, needed[int(key)], tag))
    for c, done, turn in zip(ledger.controllers, record["done"], record["turn"]):
        c.done, c.turn = done, turn
        _load_ready(ledger, c, slots, arrays[f"order.{c.stage.name}"])


def _load_rows(ledger: Ledger, arrays: Arrays) -> Ints:
    rows = ledger.rows
    slots = rows.allocate(len(arrays["row.id"]))
    for c in ledger.controllers:
        c.ready.ensure(len(rows.id))
    for name in ROW_FIELDS:
        getattr(rows, name)[slots] = arrays[f"row.{name}"]
    rows.chunk[:, slots], rows.place[:, slots] = arrays["row.chunk"], arrays["row.place"]
    rows.state[slots], rows.leased[slots] = LIVE, 0
    ledger.slot_of.update(zip(arrays["row.id"].tolist(), slots.tolist()))
    if ledger.has_groups:
        ledger.groups.join(rows.group[slots].tolist(), slots.tolist(), None)
    for c in ledger.controllers:
        c.pending.add(rows.tag[slots[(rows.pending[slots] & c.bit) != 0]], 1)
    for tag in rows.tag[slots].tolist():
        ledger.count_rows(ledger.tags[tag], 1)
    through = slots[rows.pending[slots] == 0]
    ledger.kept = through[np.argsort(rows.id[through])]
    return slots


def _order(ledger: Ledger, c: Controller) -> Ints:
    """Return ready units by name (ids, or groups' keys), in the order of taking."""
    units = c.ready.all()
    if not c.is_group:
        return ledger.rows.id[units]
    return np.array([group.key for group in ledger.groups.at(units.tolist())], np.int64)


def _load_ready(ledger: Ledger, c: Controller, slots: Ints, order: Ints) -> None:
    rows = ledger.rows
    able = slots[((rows.written[slots] & c.reads) == c.reads) & ((rows.pending[slots] & c.bit) != 0)]
    names = rows.group[able].tolist() if c.is_group else rows.id[able].tolist()
    if c.is_group:
        for key in names:
            ledger.groups[key].ready[c.group_index] += 1
        names = [key for key in dict.fromkeys(names) if ledger.groups[key].is_complete(c.group_index)]
        unit = {key: ledger.groups[key].handle for key in names}
    else:
        unit = dict(zip(names, able.tolist()))
    waiting = set(order.tolist())
    in_order = [name for name in names if name not in waiting] + order.tolist()  # leased ones had been first
    c.ready.add(np.array([unit[name] for name in in_order], np.int64))
