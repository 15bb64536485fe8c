"""Batch: jagged columns over rows, the one record that stages, dock, rollout and learner speak.

A column is one flat numpy array plus, when rows hold several values, an offsets array; nothing is ever padded.
Arrays may be read-only views into a store: code that wants to write makes its own copy. What all rows of a group have
in common (its prompt) is a GroupColumn: kept once, seen by every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Columns that the dock itself reads; every other name is the algorithm's business.
ID = "id"  # int64, unique per sample, made by the producer
GROUP = "group"  # int64, shared by the samples of one prompt
VERSION = "version"  # int32, weight version of the sample's oldest token
LENGTH = "length"  # int32, tokens of the sample (prompt and response)
LONG_ROW = 256  # values, from which on rows are copied one by one


@dataclass(frozen=True, slots=True)
class Column:
    """No `offsets`: one value (of any trailing shape) per row. Otherwise row i is `values[offsets[i]:offsets[i+1]]`."""

    values: Array
    offsets: npt.NDArray[np.int64] | None = None
    is_text: bool = False  # values are the UTF-8 bytes of one string per row

    @property
    def base(self) -> Column:
        """The column as it is kept: a row each, or a row for each group."""
        return self

    @property
    def index(self) -> npt.NDArray[Any] | None:
        """Which row of `base` is each row's; None: its own."""
        return None

    @property
    def rows(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        if self.offsets is None:
            return np.ones(self.rows, np.int64)
        return np.diff(self.offsets)

    def __getitem__(self, row: int) -> Any:
        """The row's value: a scalar, a string, or an array view."""
        if self.offsets is None:
            return self.values[row]
        value = self.values[self.offsets[row] : self.offsets[row + 1]]
        return value.tobytes().decode() if self.is_text else value

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(self.rows))

    def gather(self, rows: npt.NDArray[np.int64]) -> Column:
        if self.offsets is None:
            return Column(self.values[rows], None, self.is_text)
        lengths = self.lengths[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] >= LONG_ROW * len(rows):  # whole rows at once, where an index would outweigh them
            parts = [self.values[self.offsets[row] : self.offsets[row + 1]] for row in rows.tolist()]
            return Column(np.concatenate(parts) if parts else self.values[:0], offsets, self.is_text)
        # Index of every kept value: its row's start, plus its place inside the row.
        index = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Column(self.values[index], offsets, self.is_text)

    def slice(self, start: int, n: int) -> Column:
        """Rows `start` to `start + n` as views."""
        if start == 0 and n == self.rows:
            return self
        if self.offsets is None:
            return Column(self.values[start : start + n], None, self.is_text)
        offsets = self.offsets[start : start + n + 1]
        values = self.values[int(offsets[0]) : int(offsets[-1])]
        return Column(values, offsets if offsets[0] == 0 else offsets - offsets[0], self.is_text)

    def grouped(self, index: npt.ArrayLike) -> GroupColumn:
        """A column in which row i is row `index[i]` of this one."""
        return GroupColumn(self, np.asarray(index, np.int32))

    @staticmethod
    def jagged(rows: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> Column:
        arrays = [np.asarray(row, dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        return Column(np.concatenate(arrays) if arrays else np.empty(0, dtype), offsets)

    @staticmethod
    def text(rows: Iterable[str]) -> Column:
        jagged = Column.jagged([np.frombuffer(row.encode(), np.uint8) for row in rows], np.uint8)
        return Column(jagged.values, jagged.offsets, is_text=True)

    @staticmethod
    def concat(columns: Sequence[Column]) -> Column:
        first = columns[0]
        if all(c.index is not None for c in columns):
            starts = np.cumsum([0, *(c.base.rows for c in columns[:-1])])
            index = np.concatenate([start + c.index for start, c in zip(starts.tolist(), columns)])
            return Column.concat([c.base for c in columns]).grouped(index)
        values = np.concatenate([c.values for c in columns])
        if first.offsets is None:
            return Column(values, None, first.is_text)
        offsets = np.zeros(sum(c.rows for c in columns) + 1, np.int64)
        np.cumsum(np.concatenate([c.lengths for c in columns]), out=offsets[1:])
        return Column(values, offsets, first.is_text)


class GroupColumn(Column):
    """Rows that are the same for a whole group: `base` has them once, `index` says which is each row's. Reading a row,
    lengths and `gather` copy nothing; `values` and `offsets` are made, row by row, when somebody asks for them."""

    __slots__ = ("_base", "_index", "_whole")
    _base: Column
    _index: npt.NDArray[Any]
    _whole: Column | None

    def __init__(self, base: Column, index: npt.NDArray[Any]) -> None:
        for name, value in (("_base", base), ("_index", index), ("_whole", None), ("is_text", base.is_text)):
            object.__setattr__(self, name, value)

    @property
    def base(self) -> Column:
        return self._base

    @property
    def index(self) -> npt.NDArray[Any]:
        return self._index

    @property
    def whole(self) -> Column:
        """The same with a copy for each row."""
        if self._whole is None:
            object.__setattr__(self, "_whole", self.base.gather(self.index))
        assert self._whole is not None
        return self._whole

    @property
    def values(self) -> Array:
        return self.whole.values

    @property
    def offsets(self) -> npt.NDArray[np.int64] | None:
        return self.whole.offsets

    @property
    def rows(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + int(self.index.nbytes)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        lengths: npt.NDArray[np.int64] = self.base.lengths[self.index]
        return lengths

    def __getitem__(self, row: int) -> Any:
        return self.base[int(self.index[row])]

    def gather(self, rows: npt.NDArray[np.int64]) -> Column:
        return GroupColumn(self.base, self.index[rows])

    def slice(self, start: int, n: int) -> Column:
        index = self.index[start : start + n]
        if not n or n == self.rows:
            return GroupColumn(self.base, index)
        first = int(index.min())
        return GroupColumn(self.base.slice(first, int(index.max()) + 1 - first), index - first)

    def __reduce__(self) -> tuple[type[GroupColumn], tuple[Column, npt.NDArray[Any]]]:
        return GroupColumn, (self.base, self.index)


class Batch(Mapping[str, Column]):
    """Named columns with the same number of rows. Immutable: every operation gives a new Batch over shared arrays."""

    __slots__ = ("_columns", "rows")

    def __init__(self, columns: Mapping[str, Column | Array]) -> None:
        self._columns = {n: c if isinstance(c, Column) else Column(np.asarray(c)) for n, c in columns.items()}
        counts = {c.rows for c in self._columns.values()}
        if len(counts) > 1:
            sizes = ", ".join(f"{n}: {c.rows}" for n, c in self._columns.items())
            raise ValueError(f"columns of one batch must have the same number of rows, got {sizes}")
        self.rows: int = counts.pop() if counts else 0

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; this batch has {', '.join(self._columns) or 'none'}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:  # of the mapping: how many columns
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Batch({self.rows} rows: {', '.join(self._columns)})"

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self._columns.values())

    def values(self, name: str | None = None) -> Any:
        """`values("reward")` is that column's flat array; without a name, the mapping's own `values()`."""
        return self._columns.values() if name is None else self[name].values

    def select(self, names: Iterable[str]) -> Batch:
        return Batch({n: self[n] for n in names})

    def gather(self, rows: npt.ArrayLike) -> Batch:
        index = np.asarray(rows, np.int64)
        return Batch({n: c.gather(index) for n, c in self._columns.items()})

    def merge(self, other: Mapping[str, Column | Array]) -> Batch:
        """Columns side by side; on a name in both, `other`'s wins."""
        return Batch({**self._columns, **other})

    def row(self, index: int) -> dict[str, Any]:
        return {n: c[index] for n, c in self._columns.items()}

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        if len(batches) == 1:
            return batches[0]
        return Batch({n: Column.concat([b[n] for b in batches]) for n in batches[0]}) if batches else Batch({})
