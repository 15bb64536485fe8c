"""KeyedTable: rows found by key, written field by field, and fetched by tasks. Like the ledger it is a state machine
without a clock: the caller gives the time and serialises the calls, and every change is one recorded effect that can be
replayed.

A fetched row counts as consumed at once. It is settled when its consumer writes to it, clears it, says that it is done
or leaves in peace; the rows of a consumer that dies before are given back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.dock.keyed import state
from tidemill.dock.keyed.partition import CONSUMED, FREE, RESERVED, FieldKind, IndexBook, Partition
from tidemill.dock.keyed.sampling import First, Sampler
from tidemill.dock.keyed.tags import NO_TAGS, joined
from tidemill.dock.ledger.credit import Chunks, CreditedChunk
from tidemill.dock.ledger.records import Ints
from tidemill.errors import DockError

KEYED = "keyed"  # the first word of this table's effects
REMEMBERED_ANSWERS = 1 << 12


@dataclass(slots=True)
class Fetch:
    """Rows that one consumer has fetched for a task and not settled."""

    partition: str
    task: str
    rows: set[int]
    owner: bytes
    deadline: float
    is_remembered: bool  # by the sampler, which answers the same question with the same rows


@dataclass(frozen=True, slots=True)
class Question:
    """What a consumer asks for. `config`: of the sampler."""

    partition: str
    task: str
    fields: tuple[str, ...]
    rows: int
    config: Mapping[str, Any] = field(default_factory=dict)


class KeyedTable:
    def __init__(
        self,
        chunks: Chunks,
        *,
        sampler: Sampler | None = None,
        polls: bool = False,
        spare_rows: int = 1,
        max_rows: int | None = None,
        lease_s: float = 60.0,
    ) -> None:
        """`polls`: answer at once, with nothing, instead of letting a consumer wait. `spare_rows`: rows of a new
        partition that count before they are written."""
        self.chunks = chunks
        self.sampler: Sampler = sampler or First()
        self.polls, self.spare_rows, self.max_rows, self.lease_s = polls, spare_rows, max_rows, lease_s
        self.partitions: dict[str, Partition] = {}
        self.indexes = IndexBook()
        self.fetches: dict[int, Fetch] = {}
        self.names: dict[str, None] = {}  # all fields that were ever written
        self.answered: dict[bytes, Ints] = {}  # by request: rows that were made or fetched for it
        self.last_fetch = 0
        self.given_back = 0  # rows, of consumers that died
        self.effects: list[tuple[Any, ...]] | None = None
        self.has_news = False  # something may have become ready since the caller's last check
        self._sampler_state = b""

    # -- writing -----------------------------------------------------------------------------------------------------

    def open(self, name: str) -> Partition:
        """Return the partition of this name, new or not."""
        if name not in self.partitions:
            self._do("open", name, self.spare_rows)
        return self.partitions[name]

    def add_rows(self, name: str, n: int) -> Ints:
        self.open(name)
        indexes: Ints = self._do("add", name, n)
        return indexes

    def note_answer(self, request: bytes, indexes: Ints) -> None:
        """Remember what a request was answered with: if the answer is lost with this process, it comes again."""
        self._do("answer", request, indexes)

    def rows_of(self, name: str, keys: Sequence[str]) -> Ints:
        """Return the rows of these keys, made where they are new."""
        partition = self.open(name)
        new = list(dict.fromkeys(key for key in keys if key not in partition.keys))
        if new:
            self._do("name", name, new, self.add_rows(name, len(new)))
        return np.array([partition.keys[key] for key in keys], np.int64)

    def write(self, name: str, indexes: Ints, kinds: Sequence[FieldKind], chunk: int, nbytes: int) -> None:
        self._do("write", name, indexes, list(kinds), chunk, nbytes)

    def check_room(self, rows: int) -> None:
        """Refuse a write of this many new rows that would be more than the table may hold."""
        if self.max_rows is not None:
            held = sum(len(partition.rows) for partition in self.partitions.values())
            if held + rows > self.max_rows:
                raise DockError(
                    f"the table holds {held} rows of at most {self.max_rows}, and {rows} more were put",
                    "clear rows that are done, or raise total_storage_size",
                )

    def set_tags(self, name: str, indexes: Ints, tags: Sequence[bytes], merge: bool) -> None:
        partition = self.partitions.get(name)
        if partition is None:
            return
        if merge:
            tags = [joined(partition.tags.get(i, NO_TAGS), new) for i, new in zip(indexes.tolist(), tags)]
        self._do("tag", name, indexes, list(tags))

    def clear(self, name: str, indexes: Iterable[int]) -> None:
        partition = self.partitions.get(name)
        if partition is not None and (here := list(set(indexes) & partition.rows)):
            self._do("clear", name, np.array(here, np.int64))

    def drop(self, name: str) -> None:
        if name in self.partitions:
            self._do("drop", name)

    # -- consuming ---------------------------------------------------------------------------------------------------

    def fetch(self, ask: Question, now: float, owner: bytes) -> Ints | None:
        """Return rows for a task, which then count as consumed; None: not enough are ready."""
        partition = self.partitions.get(ask.partition)
        ready = self._ready(ask)
        if len(ready) < ask.rows and not self._may_repeat(ask):
            return np.zeros(0, np.int64) if self.polls else None
        chosen, consumed = self.sampler(ready, ask.rows, partition=partition, **ask.config)
        if not len(chosen) and not self.polls:
            raise DockError(
                f"the sampler chose nothing of {len(ready)} ready rows for {ask.rows} that {ask.task!r} asked for",
                "check the sampler",
            )
        if len(consumed) and partition is not None:
            is_remembered = self.sampler.has_cached_result(ask.partition, ask.task, dict(ask.config))
            rows = np.asarray(consumed, np.int64)
            self._do("mark", self.last_fetch + 1, ask.partition, ask.task, rows, owner, now, is_remembered)
        self._note_sampler()
        return np.asarray(chosen, np.int64)

    def _ready(self, ask: Question) -> Ints:
        partition = self.partitions.get(ask.partition)
        return np.zeros(0, np.int64) if partition is None else partition.ready(ask.fields, ask.task)

    def _may_repeat(self, ask: Question) -> bool:
        """Say whether the sampler has an answer that needs no ready rows: one it gave before."""
        if not self.sampler.has_cached_result(ask.partition, ask.task, dict(ask.config)):
            return False
        marks = self.partitions[ask.partition].marks.get(ask.task) if ask.partition in self.partitions else None
        return self.polls or (marks is not None and bool((marks == RESERVED).any()))

    def settle(self, owner: bytes, name: str | None = None, indexes: Ints | None = None) -> None:
        """End an owner's claim: on rows that it has finished, or on all."""
        if any(fetch.owner == owner for fetch in self.fetches.values()):
            self._do("settle", owner, name, indexes)

    def keep(self, owner: bytes, now: float) -> None:
        for fetch in self.fetches.values():
            if fetch.owner == owner:
                fetch.deadline = now + self.lease_s

    def release(self, owner: bytes) -> None:
        """Give back the rows of a consumer whose process has ended."""
        for number in [number for number, fetch in self.fetches.items() if fetch.owner == owner]:
            self._do("give_back", number)

    def expire(self, now: float) -> None:
        for number in [number for number, fetch in self.fetches.items() if fetch.deadline <= now]:
            self._do("give_back", number)

    def reset(self, name: str, task: str | None) -> None:
        if name in self.partitions:
            self._do("reset", name, task)

    def lose(self, chunks: Iterable[int]) -> None:
        """Note that the bytes of these chunks are gone: their fields are no longer written."""
        self._do("lose", np.fromiter(chunks, np.int64))

    def replace(self, saved: bytes, chunks: Mapping[int, tuple[int, int]]) -> None:
        """Make the table what it was when it was saved. `chunks`: number and bytes now, by the number then."""
        self._do("load", saved, list(chunks.items()))

    def set_sampler(self, saved: bytes) -> None:
        self._sampler_state = saved
        self.sampler.load(saved)

    def load_fetches(self, saved: Iterable[Mapping[str, Any]], last: int) -> None:
        self.last_fetch = last
        for record in saved:
            fetch = {name: record[name] for name in Fetch.__dataclass_fields__}
            self.fetches[record["number"]] = Fetch(**{**fetch, "rows": set(record["rows"])})

    def keep_all(self, now: float) -> None:
        """Give all consumers time to come back after a restart."""
        for fetch in self.fetches.values():
            fetch.deadline = now + self.lease_s

    def _note_sampler(self) -> None:
        saved = self.sampler.dumped()
        if saved != self._sampler_state:
            self._do("sampler", saved)

    def figures(self) -> dict[str, Any]:
        """Return what there is in each partition, for people."""
        return {
            name: {
                "rows": len(partition.rows),
                "consumed": {task: int((marks == CONSUMED).sum()) for task, marks in partition.marks.items()},
            }
            for name, partition in self.partitions.items()
        }

    # -- effects -----------------------------------------------------------------------------------------------------

    def _do(self, name: str, *arguments: Any) -> Any:
        if self.effects is not None:
            self.effects.append((KEYED, name, *arguments))
        return _DOING[name](self, *arguments)

    def redo(self, effect: tuple[Any, ...]) -> None:
        """Replay one recorded effect after a restart."""
        _, name, *arguments = effect
        if name == "write":
            arguments[2] = [_kind(kind) for kind in arguments[2]]
        _DOING[name](self, *arguments)

    def _open(self, name: str, spare_rows: int) -> None:
        partition = self.partitions[name] = Partition(name)
        if spare_rows > 0:
            partition.spare.update(self.indexes.allocate(name, spare_rows))
            partition.reach(max(partition.spare))

    def _add(self, name: str, n: int) -> Ints:
        partition = self.partitions[name]
        indexes = sorted(partition.spare)[:n] if len(partition.spare) >= n else list(partition.spare)
        partition.spare.difference_update(indexes)
        indexes += self.indexes.allocate(name, n - len(indexes)) if len(indexes) < n else []
        partition.rows.update(indexes)
        partition.reach(max(indexes, default=-1))
        return np.array(indexes, np.int64)

    def _answer(self, request: bytes, indexes: Ints) -> None:
        self.answered[request] = indexes
        if len(self.answered) > REMEMBERED_ANSWERS:
            del self.answered[next(iter(self.answered))]

    def _name(self, name: str, keys: Sequence[str], indexes: Ints) -> None:
        partition = self.partitions[name]
        partition.keys.update(zip(keys, indexes.tolist()))
        partition.key_of.update(zip(indexes.tolist(), keys))

    def _write(self, name: str, indexes: Ints, kinds: Sequence[FieldKind], chunk: int, nbytes: int) -> None:
        partition, rows = self.partitions[name], indexes.tolist()
        once = np.unique(indexes)  # of a row that is written twice the last value counts
        self.chunks.add(chunk, CreditedChunk((), nbytes, len(once) * len(kinds), name))
        places = np.arange(len(rows), dtype=np.int32)
        partition.reach(max(rows, default=-1))
        partition.rows.update(rows)
        for kind in kinds:
            self.names[kind.name] = None
            one = partition.field_of(kind.name)
            self._unref(one.chunk[once])
            one.chunk[indexes], one.place[indexes] = chunk, places
            one.learn(kind, rows)
        self.has_news = True

    def _unref(self, chunks: Ints) -> None:
        held = chunks[chunks >= 0].tolist()
        if held:
            self.chunks.unref(held)

    def _tag(self, name: str, indexes: Ints, tags: Sequence[bytes]) -> None:
        self.partitions[name].tags.update(zip(indexes.tolist(), tags))

    def _clear(self, name: str, indexes: Ints) -> None:
        partition, rows = self.partitions[name], indexes.tolist()
        for one in partition.fields.values():
            self._unref(one.chunk[indexes])
            one.chunk[indexes] = -1
            one.forget(rows)
        for marks in partition.marks.values():
            marks[indexes] = FREE
        partition.rows.difference_update(rows)
        for i in rows:
            partition.tags.pop(i, None)
            key = partition.key_of.pop(i, None)
            if key is not None and partition.keys.get(key) == i:
                del partition.keys[key]
        self._forget_fetched(lambda fetch: fetch.partition == name, set(rows))
        self.indexes.release(name, rows)

    def _drop(self, name: str) -> None:
        partition = self.partitions[name]
        held = list(partition.rows | partition.spare)
        self._clear(name, np.array(held, np.int64))
        del self.partitions[name]
        self.sampler.clear_cache(name)

    def _mark(
        self, number: int, name: str, task: str, rows: Ints, owner: bytes, now: float, is_remembered: bool
    ) -> None:
        self.last_fetch = number
        self.partitions[name].marks_of(task)[rows] = CONSUMED
        held = set(rows.tolist())
        self.fetches[number] = Fetch(name, task, held, owner, now + self.lease_s, is_remembered)

    def _settle(self, owner: bytes, name: str | None, indexes: Ints | None) -> None:
        rows = None if indexes is None else set(indexes.tolist())
        self._forget_fetched(lambda fetch: fetch.owner == owner and name in (None, fetch.partition), rows)

    def _forget_fetched(self, is_meant: Callable[[Fetch], bool], rows: set[int] | None) -> None:
        for number, fetch in list(self.fetches.items()):
            if is_meant(fetch):
                fetch.rows = set() if rows is None else fetch.rows - rows
                if not fetch.rows:
                    del self.fetches[number]

    def _give_back(self, number: int) -> None:
        fetch = self.fetches.pop(number)
        marks = self.partitions[fetch.partition].marks_of(fetch.task)
        marks[np.fromiter(fetch.rows, np.int64)] = RESERVED if fetch.is_remembered else FREE
        self.given_back += len(fetch.rows)
        self.has_news = True

    def _reset(self, name: str, task: str | None) -> None:
        for known, marks in self.partitions[name].marks.items():
            if task in (None, known):
                marks[:] = FREE
        self._forget_fetched(lambda fetch: fetch.partition == name and task in (None, fetch.task), None)
        self.has_news = True

    def _lose(self, chunks: Ints) -> None:
        for partition in self.partitions.values():
            for one in partition.fields.values():
                gone = np.flatnonzero(np.isin(one.chunk, chunks) & (one.chunk >= 0))
                if len(gone):
                    self._unref(one.chunk[gone])
                    one.chunk[gone] = -1
                    one.forget(gone.tolist())

    def _load(self, saved: bytes, chunks: Iterable[tuple[int, Sequence[int]]]) -> None:
        before = [one.chunk for partition in self.partitions.values() for one in partition.fields.values()]
        state.load(self, saved, {old: (new, nbytes) for old, (new, nbytes) in chunks})
        for held in before:
            self._unref(held)
        self.fetches.clear()
        self.has_news = True


_DOING: dict[str, Callable[..., Any]] = {
    "open": KeyedTable._open, "add": KeyedTable._add, "name": KeyedTable._name, "write": KeyedTable._write,
    "tag": KeyedTable._tag, "clear": KeyedTable._clear, "drop": KeyedTable._drop, "mark": KeyedTable._mark,
    "settle": KeyedTable._settle, "give_back": KeyedTable._give_back, "reset": KeyedTable._reset,
    "lose": KeyedTable._lose, "answer": KeyedTable._answer, "sampler": KeyedTable.set_sampler,
    "load": KeyedTable._load,
}  # fmt: skip


def _kind(record: Mapping[str, Any] | FieldKind) -> FieldKind:
    if isinstance(record, FieldKind):
        return record
    shape = record["shape"]
    return FieldKind(**{**record, "shape": None if shape is None else tuple(shape)})
