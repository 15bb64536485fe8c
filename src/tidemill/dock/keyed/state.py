"""A keyed table's whole state as bytes, for snapshots of the ledger and for checkpoints of its users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.dock.keyed.partition import Field, Partition
from tidemill.dock.ledger.credit import CreditedChunk
from tidemill.dock.net.journal import decode, encode
from tidemill.errors import DockError

if TYPE_CHECKING:
    from tidemill.dock.keyed.table import KeyedTable

FORMAT = 1


def chunks_of(table: KeyedTable) -> set[int]:
    """Return the chunks that rows of the table need."""
    found: set[int] = set()
    for partition in table.partitions.values():
        for one in partition.fields.values():
            found.update(one.chunk[one.chunk >= 0].tolist())
    return found


def dump(table: KeyedTable) -> bytes:
    return encode(
        {
            "format": FORMAT,
            "partitions": [_dump_partition(partition) for partition in table.partitions.values()],
            "next": table.indexes.next,
            "free": table.indexes.free,
            "names": list(table.names),
            "sampler": table.sampler.dumped(),
            "fetches": [{**asdict(one), "rows": sorted(one.rows), "number": n} for n, one in table.fetches.items()],
            "last_fetch": table.last_fetch,
            "answered": list(table.answered.items()),
        }
    )


def _dump_partition(partition: Partition) -> dict[str, Any]:
    return {
        "name": partition.name,
        "rows": sorted(partition.rows),
        "spare": sorted(partition.spare),
        "keys": list(partition.keys.items()),
        "tags": list(partition.tags.items()),
        "marks": list(partition.marks.items()),
        "fields": [
            {
                "name": name, "dtype": one.dtype, "shape": one.shape, "is_nested": one.is_nested,
                "is_object": one.is_object, "is_new": one.is_new, "shapes": list(one.shapes.items()),
                "rows": sorted(one.rows), "chunk": one.chunk, "place": one.place,
            }
            for name, one in partition.fields.items()
        ],
    }  # fmt: skip


def load(table: KeyedTable, raw: bytes, chunks: Mapping[int, tuple[int, int]]) -> None:
    """Make the table what it was. `chunks`: the number now, and the bytes, of each chunk that its rows need."""
    record = decode(raw)
    if record.get("format") != FORMAT:
        raise DockError("this is not the state of a keyed table", "save it with this version")
    loaded = [_load_partition(saved) for saved in record["partitions"]]
    table.partitions = {partition.name: partition for partition in loaded}
    refs: dict[int, int] = dict.fromkeys(chunks, 0)
    for partition in loaded:
        for one in partition.fields.values():
            held, counts = np.unique(one.chunk[one.chunk >= 0], return_counts=True)
            for key, count in zip(held.tolist(), counts.tolist()):
                refs[key] += count
            one.chunk = _renumbered(one.chunk, {old: new for old, (new, _) in chunks.items()})
    for old, (new, nbytes) in chunks.items():
        table.chunks.add(new, CreditedChunk((), nbytes, refs[old], ""))
    table.indexes.next, table.indexes.free = record["next"], list(record["free"])
    table.indexes.of = {name: p.rows | p.spare for name, p in table.partitions.items() if p.rows or p.spare}
    table.names = dict.fromkeys(record["names"])
    table.load_fetches(record["fetches"], record["last_fetch"])
    table.answered = {bytes(request): rows for request, rows in record["answered"]}
    table.set_sampler(record["sampler"])


def _load_partition(saved: Mapping[str, Any]) -> Partition:
    partition = Partition(saved["name"], set(saved["rows"]), set(saved["spare"]), dict(saved["keys"]))
    partition.key_of = {i: key for key, i in partition.keys.items()}
    partition.tags = dict(saved["tags"])
    partition.marks = {task: marks.copy() for task, marks in saved["marks"]}
    for record in saved["fields"]:
        fields = {**record, "shapes": dict(record["shapes"]), "rows": set(record["rows"])}
        name = fields.pop("name")
        fields["shape"] = None if record["shape"] is None else tuple(record["shape"])
        fields["chunk"], fields["place"] = record["chunk"].copy(), record["place"].copy()
        partition.fields[name] = Field(**fields)
        partition.capacity = len(record["chunk"])
    lengths = [len(marks) for marks in partition.marks.values()]
    partition.capacity = max([partition.capacity, *lengths, 0])
    partition.reach(max(partition.rows | partition.spare, default=-1))
    return partition


def _renumbered(chunk: Any, new: Mapping[int, int]) -> Any:
    found = chunk.copy()
    for old, number in new.items():
        found[chunk == old] = number
    return found
