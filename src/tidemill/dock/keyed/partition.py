"""Partition: the rows of one name in a keyed table, their keys, tags and fields, and which task has consumed which.
Pure data and small changes of it; what is decided, and what is recorded of it, is in `table`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidemill.dock.ledger.records import Ints
from tidemill.errors import DockError

Marks = npt.NDArray[np.int8]

FREE, CONSUMED, RESERVED = 0, 1, 2  # RESERVED: given back, and kept for the consumer whose sampler remembers it


class Absent(DockError):
    """There is no such partition, row or value."""


@dataclass(frozen=True, slots=True)
class FieldKind:
    """What a write says of one field. `shapes`: of each row, where rows may differ; `shape`: of every row, or of the
    first."""

    name: str
    dtype: str | None  # None: not a tensor
    is_nested: bool = False
    shape: tuple[int, ...] | None = None
    shapes: list[list[int]] | None = None

    @property
    def is_object(self) -> bool:
        return self.dtype is None


@dataclass(slots=True)
class Field:
    """One field of a partition: what its rows are like, and where each row's value is."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    is_nested: bool = False
    is_object: bool = False
    is_new: bool = True  # nothing has been written yet, or everything was cleared
    shapes: dict[int, list[int]] = field(default_factory=dict)  # of each row, while they differ
    rows: set[int] = field(default_factory=set)
    chunk: Ints = field(default_factory=lambda: np.full(0, -1, np.int64))
    place: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def reach(self, capacity: int) -> None:
        grown = capacity - len(self.chunk)
        if grown > 0:
            self.chunk = np.concatenate([self.chunk, np.full(grown, -1, np.int64)])
            self.place = np.concatenate([self.place, np.zeros(grown, np.int32)])

    def learn(self, kind: FieldKind, indexes: Sequence[int]) -> None:
        """Note what newly written rows are like. A field keeps its first dtype."""
        if self.is_new:
            self.dtype, self.shape = kind.dtype, kind.shape
            self.is_nested, self.is_object, self.is_new = kind.is_nested, kind.is_object, False
            self.shapes = dict(zip(indexes, kind.shapes)) if kind.shapes is not None else {}
        elif kind.dtype is not None and self.dtype is not None and kind.dtype != self.dtype:
            return
        elif kind.shapes is not None:
            self._differ()
            self.shapes.update(zip(indexes, kind.shapes))
        elif kind.shape is not None and (self.is_nested or (not self.is_object and self.shape != kind.shape)):
            self._differ()
            self.shapes.update((i, list(kind.shape)) for i in indexes)
        self.rows.update(indexes)

    def _differ(self) -> None:
        """From now on rows may differ in shape."""
        if not self.is_nested:
            if self.shape is not None:
                self.shapes.update((i, list(self.shape)) for i in self.rows)
            self.is_nested, self.shape = True, None

    def forget(self, indexes: Iterable[int]) -> None:
        for i in indexes:
            self.shapes.pop(i, None)
            self.rows.discard(i)
        if not self.rows:
            self.dtype, self.shape, self.is_nested, self.is_object, self.is_new = None, None, False, False, True
            self.shapes.clear()
        elif self.is_nested and len(left := {tuple(shape) for shape in self.shapes.values()}) == 1:
            self.is_nested, self.shape = False, left.pop()
            self.shapes.clear()


@dataclass(slots=True)
class Partition:
    name: str
    rows: set[int] = field(default_factory=set)
    spare: set[int] = field(default_factory=set)  # promised to later writes; they count as not consumed
    keys: dict[str, int] = field(default_factory=dict)
    key_of: dict[int, str] = field(default_factory=dict)
    tags: dict[int, bytes] = field(default_factory=dict)  # packed
    fields: dict[str, Field] = field(default_factory=dict)  # in the order of their first writing
    marks: dict[str, Marks] = field(default_factory=dict)  # of each task, by row
    capacity: int = 0

    def reach(self, highest: int) -> None:
        if highest >= self.capacity:
            self.capacity = max(highest + 1, 2 * self.capacity)
            for one in self.fields.values():
                one.reach(self.capacity)
            for task, marks in self.marks.items():
                self.marks[task] = np.concatenate([marks, np.zeros(self.capacity - len(marks), np.int8)])

    def marks_of(self, task: str) -> Marks:
        if task not in self.marks:
            self.marks[task] = np.zeros(self.capacity, np.int8)
        return self.marks[task]

    def field_of(self, name: str) -> Field:
        if name not in self.fields:
            self.fields[name] = Field()
            self.fields[name].reach(self.capacity)
        return self.fields[name]

    def counted(self) -> Ints:
        """Return the rows that there are, or will be."""
        return np.array(sorted(self.rows | self.spare), np.int64)

    def ready(self, fields: Sequence[str], task: str) -> Ints:
        """Return rows that have all these fields and that the task has not consumed, the lowest first."""
        if any(name not in self.fields for name in fields):
            return np.zeros(0, np.int64)
        able = self.marks[task] == FREE if task in self.marks else np.ones(self.capacity, np.bool_)
        for name in fields:
            able &= self.fields[name].chunk >= 0
        return np.flatnonzero(able) if fields else np.array(sorted(self.rows), np.int64)

    def common_fields(self, indexes: Ints) -> list[str]:
        """Return the fields that all these rows have."""
        return [name for name, one in self.fields.items() if bool((one.chunk[indexes] >= 0).all())]

    def has_all(self, fields: Sequence[str], indexes: Ints) -> npt.NDArray[np.int8]:
        """Say for each row whether it has those of the fields that the partition knows."""
        known = [self.fields[name].chunk for name in fields if name in self.fields]
        if not known:
            return np.zeros(len(indexes), np.int8)
        able = np.ones(len(indexes), np.bool_)
        for chunk in known:
            able &= chunk[indexes] >= 0
        return able.astype(np.int8)

    def kinds(self, fields: Sequence[str], indexes: Sequence[int]) -> list[FieldKind]:
        """Describe fields for these rows."""
        found = []
        for name in fields:
            one = self.fields.get(name)
            if one is not None and not one.is_new:
                shapes = [one.shapes.get(i, []) for i in indexes] if one.is_nested and one.shapes else None
                found.append(FieldKind(name, one.dtype, one.is_nested, one.shape, shapes))
        return found


class IndexBook:
    """Gives rows numbers that are unique over all partitions; numbers of cleared rows are used again."""

    def __init__(self) -> None:
        self.next = 0
        self.free: list[int] = []
        self.of: dict[str, set[int]] = {}

    def allocate(self, partition: str, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        more = n - len(taken)
        taken += range(self.next, self.next + more)
        self.next += more
        self.of.setdefault(partition, set()).update(taken)
        return taken

    def release(self, partition: str, indexes: Iterable[int]) -> None:
        held = self.of.get(partition, set())
        released = [i for i in indexes if i in held]
        held.difference_update(released)
        self.free += released
        if not held:
            self.of.pop(partition, None)
