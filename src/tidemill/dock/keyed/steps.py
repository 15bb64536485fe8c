"""KeyedSteps: the ledger's side of the messages about a keyed table. A fetch that finds too few rows is parked, and
served by the write that completes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.dock.keyed import state
from tidemill.dock.keyed.partition import RESERVED, Absent, Partition
from tidemill.dock.keyed.table import KeyedTable, Question
from tidemill.dock.keyed.tags import NO_TAGS, with_numbers
from tidemill.dock.ledger.records import Ints
from tidemill.dock.net import keyed_messages as k
from tidemill.dock.net.compact import distinct, pack
from tidemill.dock.net.messages import Done, Nothing
from tidemill.dock.net.parts import Message, Outputs
from tidemill.dock.net.wire import OWNER_BYTES
from tidemill.dock.store.catalog import Catalog
from tidemill.errors import DockError


@dataclass(slots=True)
class ParkedFetch:
    client: bytes
    seq: bytes
    message: k.KeyedFetch
    deadline: float


class KeyedSteps:
    def __init__(self, table: KeyedTable, catalog: Catalog) -> None:
        self.table = table
        self._catalog = catalog
        self._parked: list[ParkedFetch] = []

    def step(self, client: bytes, seq: bytes, message: k.FromClient, now: float) -> Message | None:
        """Carry a request out. None: it is parked."""
        table, request = self.table, client + seq
        match message:
            case k.KeyedWrite():
                return self._write(request, message)
            case k.KeyedFind(name, keys, creates):
                return self._find(name, keys, creates)
            case k.KeyedFetch():
                answer = self._fetch(request, message, now)
                if answer is None and message.wait_s > 0:
                    self._parked.append(ParkedFetch(client, seq, message, now + message.wait_s))
                    return None
                return answer or Nothing()
            case k.KeyedLook(name, fields):
                return self._look(name, fields)
            case k.KeyedReserve():
                return self._reserve(request, message)
            case k.KeyedRead():
                return self._read(message)
            case k.KeyedTag(name, raw, tags):
                table.set_tags(name, _ints(raw), tags, merge=False)
                return Done()
            case k.KeyedClear():
                return self._clear(message)
            case k.KeyedMarks():
                return self._marks(message)
            case k.KeyedReset(name, task):
                table.reset(name, task)
                return Done()
            case k.KeyedList(name):
                return self._list(name)
            case k.KeyedNames(name, raw):
                known = self._partition(name).key_of
                return k.KeyedNamed([known.get(i) for i in _ints(raw).tolist()])
            case k.KeyedPartitions():
                return k.KeyedNamed(list(table.partitions))
            case _:
                return self._claim(client[:OWNER_BYTES], message, now)

    def _claim(self, owner: bytes, message: k.FromClient, now: float) -> Message:
        match message:
            case k.KeyedSettle(name, raw):
                self.table.settle(owner, name, None if raw is None else _ints(raw))
                return Done()
            case k.KeyedKeep():
                self.table.keep(owner, now)
                return Done()
            case k.KeyedSave():
                return k.KeyedState(*self._save())
            case k.KeyedLoad(raw, outputs):
                self._load(raw, outputs)
                return Done()
            case _:
                raise DockError(f"the ledger has no use for {type(message).__name__}")

    def serve(self, answer: Callable[[bytes, bytes, Message | Exception], None], now: float) -> None:
        """Answer parked fetches that something was written for."""
        if not self.table.has_news:
            return
        self.table.has_news = False
        for parked in list(self._parked):
            try:
                found: Message | Exception | None = self._fetch(parked.client + parked.seq, parked.message, now)
            except Exception as error:  # the sampler's, or the asker's: nobody else's
                found = error
            if found is not None:
                self._parked.remove(parked)
                answer(parked.client, parked.seq, found)

    def expire(self, answer: Callable[[bytes, bytes, Message | Exception], None], now: float) -> None:
        self.table.expire(now)
        for parked in [parked for parked in self._parked if parked.deadline <= now]:
            self._parked.remove(parked)
            answer(parked.client, parked.seq, Nothing())

    def forget(self, client: bytes) -> None:
        self._parked = [parked for parked in self._parked if parked.client != client]

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _write(self, request: bytes, message: k.KeyedWrite) -> Message:
        table, name = self.table, message.partition
        if message.indexes is not None:
            indexes = _ints(message.indexes)
            self._check_rows(name, indexes)
        elif message.keys is not None:
            known = table.partitions[name].keys if name in table.partitions else {}
            table.check_room(len({key for key in message.keys if key not in known}))
            indexes = table.rows_of(name, message.keys)
        else:
            table.check_room(message.rows)
            indexes = self._once(request, lambda: table.add_rows(name, message.rows))
        outputs = message.outputs
        if outputs.copies:
            chunk = self._catalog.add(outputs.nbytes, self._catalog.usable(outputs.copies))
            table.write(name, indexes, message.kinds, chunk, outputs.nbytes)
        if message.tags is not None:
            table.set_tags(name, indexes, message.tags, message.merges)
        if message.indexes is not None:
            table.settle(request[:OWNER_BYTES], name, indexes)
        partition = table.partitions[name]
        common = partition.common_fields(indexes) if message.keys is not None else []
        return k.KeyedRows(indexes.tobytes(), partition.kinds(common, ()), b"", _tags(partition, indexes))

    def _reserve(self, request: bytes, message: k.KeyedReserve) -> Message:
        indexes = self._once(request, lambda: self.table.add_rows(message.partition, message.rows))
        return self._describe(self.table.open(message.partition), indexes, message.fields, is_ready=False)

    def _once(self, request: bytes, make: Callable[[], Ints]) -> Ints:
        """Return what this request was answered with, should it have been answered before a restart."""
        if request not in self.table.answered:
            self.table.note_answer(request, make())
        return self.table.answered[request]

    def _find(self, name: str, keys: list[str], creates: bool) -> Message:
        partition = self.table.partitions.get(name)
        if creates:
            indexes = self.table.rows_of(name, keys)
        elif partition is None:
            return Nothing()
        else:
            indexes = np.array([partition.keys[key] for key in keys if key in partition.keys], np.int64)
        partition = self.table.partitions[name]
        return self._describe(partition, indexes, partition.common_fields(indexes))

    def _fetch(self, request: bytes, message: k.KeyedFetch, now: float) -> Message | None:
        table = self.table
        indexes: Ints | None = table.answered.get(request)
        if indexes is None:
            config = with_numbers(message.config)
            ask = Question(message.partition, message.task, tuple(message.fields), message.rows, config)
            indexes = table.fetch(ask, now, request[:OWNER_BYTES])
            if indexes is None:
                return None
            table.note_answer(request, indexes)
        if not len(indexes):  # the table polls, and has too little
            return k.KeyedRows(b"", [], b"")
        return self._describe(self._partition(message.partition), indexes, message.fields, is_ready=True)

    def _look(self, name: str, fields: list[str] | None) -> Message:
        partition = self._partition(name)
        indexes = np.array(list(self.table.indexes.of.get(name, ())), np.int64)
        return self._describe(partition, indexes, list(partition.fields) if fields is None else fields)

    def _describe(
        self, partition: Partition, indexes: Ints, fields: list[str], is_ready: bool | None = None
    ) -> k.KeyedRows:
        if is_ready is None:
            ready = partition.has_all(fields, indexes).tobytes()
        else:
            ready = bytes([is_ready]) * len(indexes)
        kinds = partition.kinds(fields, indexes.tolist())
        return k.KeyedRows(indexes.tobytes(), kinds, ready, _tags(partition, indexes))

    def _read(self, message: k.KeyedRead) -> Message:
        partition = self.table.partitions.get(message.partition)
        if message.keys is not None:
            known = {} if partition is None else partition.keys
            indexes = np.array([known[key] for key in message.keys if key in known], np.int64)
            if not len(indexes):
                return Nothing()
        else:
            assert message.indexes is not None
            indexes = _ints(message.indexes)
            self._check_rows(message.partition, indexes)
        assert partition is not None
        common = partition.common_fields(indexes)
        fields = common
        if message.fields is not None:  # by key, what not all have is left out; by number, it must be there
            fields = [name for name in message.fields if name in common or message.keys is None]
        missing = [name for name in fields if name not in common]
        if missing:
            kind = Absent if all(name in self.table.names for name in missing) else DockError
            raise kind(f"{missing[0]!r} is not written for all {len(indexes)} rows of {partition.name!r}")
        is_unwritten = message.keys is not None and not common
        return self._places(partition, indexes, fields) if not is_unwritten else k.KeyedPlaces(0, [], [])

    def _places(self, partition: Partition, indexes: Ints, fields: list[str]) -> k.KeyedPlaces:
        places, chunks = [], dict[int, None]()
        for name in fields:
            one = partition.fields[name]
            held = one.chunk[indexes]
            chunks.update(dict.fromkeys(distinct(held)))
            places.append(k.FieldPlaces(name, pack(held), pack(one.place[indexes])))
        return k.KeyedPlaces(len(indexes), places, [self._catalog.at(key) for key in chunks])

    def _clear(self, message: k.KeyedClear) -> Message:
        table, name = self.table, message.partition
        if message.keys is not None:
            known = table.partitions[name].keys if name in table.partitions else {}
            table.clear(name, [known[key] for key in message.keys if key in known])
        elif message.indexes is not None:
            table.clear(name, _ints(message.indexes).tolist())
        else:
            table.drop(name)
        return Done()

    def _marks(self, message: k.KeyedMarks) -> Message:
        partition = self.table.partitions.get(message.partition)
        if partition is None:
            return Nothing()
        indexes = partition.counted()
        partition.reach(int(indexes[-1]) if len(indexes) else -1)
        if message.task is not None:
            marks = partition.marks_of(message.task)[indexes].copy()
            marks[marks == RESERVED] = 0
            return k.KeyedMarked(indexes.tobytes(), marks.tobytes(), 1)
        fields = message.fields or []
        if not fields or any(name not in partition.fields for name in fields):
            return Nothing()
        wanted = [one for name, one in partition.fields.items() if name in fields]
        written = np.stack([one.chunk[indexes] >= 0 for one in wanted], 1).astype(np.int8)
        return k.KeyedMarked(indexes.tobytes(), written.tobytes(), len(wanted))

    def _list(self, name: str | None) -> Message:
        known = self.table.partitions
        chosen = known if name is None else {name: known[name]} if name in known else {}
        return k.KeyedListing(
            {one: {key: p.tags.get(i, NO_TAGS) for key, i in p.keys.items()} for one, p in chosen.items()}
        )

    def _save(self) -> tuple[bytes, list[Any]]:
        keys = sorted(state.chunks_of(self.table))
        return state.dump(self.table), [self._catalog.at(key) for key in keys]

    def _load(self, raw: bytes, outputs: dict[int, Outputs]) -> None:
        new = {}
        for key, where in outputs.items():
            new[key] = self._catalog.add(where.nbytes, self._catalog.usable(where.copies)), where.nbytes
        self.table.replace(raw, new)

    def _partition(self, name: str) -> Partition:
        if name not in self.table.partitions:
            raise DockError(f"there is no partition {name!r}", "it was cleared, or nothing was put there yet")
        return self.table.partitions[name]

    def _check_rows(self, name: str, indexes: Ints) -> None:
        partition = self.table.partitions.get(name)
        if partition is None or not set(indexes.tolist()) <= partition.rows:
            raise Absent(f"some of {len(indexes)} rows are not in partition {name!r}", "they were cleared")


def _tags(partition: Partition, indexes: Ints) -> list[bytes] | None:
    if not partition.tags:
        return None
    return [partition.tags.get(i, NO_TAGS) for i in indexes.tolist()]


def _ints(raw: bytes) -> Ints:
    return np.frombuffer(raw, np.int64)
