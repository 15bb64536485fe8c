"""Makes one batch from stored chunks: views where the rows are adjacent in one chunk, else a single copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tidemill.batch import Batch, Column
from tidemill.dock.ledger.records import META, Grant, Ints
from tidemill.dock.net.compact import is_range
from tidemill.errors import DockError

Array = npt.NDArray[Any]
Allocate = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]  # column, shape, dtype


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of one chunk: their places in the batch and in the chunk, and whether each is one range."""

    chunk: int
    positions: Ints
    places: Ints
    goes_together: bool
    lies_together: bool

    @staticmethod
    def of(chunk: int, positions: Ints, places: Ints) -> Run:
        return Run(chunk, positions, places, is_range(positions), is_range(places))

    def of_base(self, column: Column) -> tuple[Column, Run]:
        """Return the stored column, and the places of these rows in it."""
        if column.index is None:
            return column, self
        return column.base, Run.of(self.chunk, self.positions, column.index[self.places].astype(np.int64))


LONG_ROW = 64  # values per row from which copying rows beats building an index of all values


class StoredColumns(Protocol):
    """A chunk's columns: a Batch on the heap, or a StoredChunk in shared memory."""

    rows: int

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> Column: ...


class LeasedBatch(Batch):
    """A batch with views of the store. The ledger's own columns are made on first use."""

    __slots__ = ("_grant", "_stored", "_whole")

    def __init__(self, grant: Grant, stored: dict[str, Column]) -> None:
        self.rows = grant.rows
        self._grant, self._stored = grant, stored
        self._whole: dict[str, Column] | None = None

    @property
    def _columns(self) -> dict[str, Column]:  # type: ignore[override]
        if self._whole is None:
            self._whole = {**meta_columns(self._grant), **self._stored}
        return self._whole

    def __contains__(self, name: object) -> bool:
        return name in self._stored or name in META

    def __getitem__(self, name: str) -> Column:
        column = self._stored.get(name)
        return super().__getitem__(name) if column is None else column

    def __reduce__(self) -> tuple[type[Batch], tuple[dict[str, Column]]]:
        return Batch, (self._columns,)


def assemble(grant: Grant, chunks: Mapping[int, StoredColumns], allocate: Allocate | None = None) -> Batch:
    """Gather rows. `allocate` returns the arrays to copy into (a reusable, pinned buffer); without it, views where
    possible."""
    if not grant.rows:  # a rank's share is empty: nothing is stored that would tell a dtype
        return Batch(meta_columns(grant))
    if allocate is None and all(isinstance(piece.chunks, int) for piece in grant.pieces):
        return LeasedBatch(grant, _views(grant, chunks))
    columns = meta_columns(grant)
    holders = [[chunks[key] for key in piece.keys] for piece in grant.pieces]
    runs: dict[tuple[int, ...], list[Run]] = {}
    for name in grant.columns:
        if name in META:
            continue
        parts = tuple(i for i, stored in enumerate(holders) if any(name in chunk for chunk in stored))
        if parts not in runs:
            runs[parts] = _runs(grant, parts, name, chunks)
        columns[name] = _column(name, runs[parts], chunks, grant.rows, allocate)
    return Batch(columns)


def _views(grant: Grant, chunks: Mapping[int, StoredColumns]) -> dict[str, Column]:
    """Gather where every piece is adjacent in one chunk: what one put or commit wrote and one take got."""
    columns: dict[str, Column] = {}
    n = grant.rows
    newest_first = [(chunks[int(piece.chunks)], int(piece.places)) for piece in reversed(grant.pieces)]
    for name in grant.columns:
        if name in META:
            continue
        for chunk, first in newest_first:
            if name in chunk:
                is_whole = first == 0 and n == chunk.rows
                columns[name] = chunk[name] if is_whole else slice_rows(chunk[name], first, n)
                break
        else:
            raise _not_stored(name, grant.ids)
    return columns


def meta_columns(grant: Grant) -> dict[str, Column]:
    return {name: Column(grant.meta[name]) for name in META}


def _runs(grant: Grant, parts: tuple[int, ...], name: str, chunks: Mapping[int, StoredColumns]) -> list[Run]:
    """Find which rows come from which chunk. Later parts are newer and win."""
    if len(parts) == 1:
        keys, places = grant.pieces[parts[0]].of_rows(grant.rows)
        first = int(keys[0])
        if len(keys) == 1 or bool((keys == first).all()):  # the usual case: all from one chunk
            return [Run.of(first, np.arange(len(keys)), places.astype(np.int64))]
    chunk_of = np.full(grant.rows, -1, np.int64)
    place_of = np.zeros(grant.rows, np.int64)
    for i in parts:
        keys, places = grant.pieces[i].of_rows(grant.rows)
        mine = np.isin(keys, [key for key in set(keys.tolist()) if key >= 0 and name in chunks[key]])
        chunk_of[mine], place_of[mine] = keys[mine], places[mine]
    if (chunk_of < 0).any():
        raise _not_stored(name, grant.ids[chunk_of < 0])
    distinct = dict.fromkeys(chunk_of.tolist())
    return [Run.of(key, np.flatnonzero(chunk_of == key), place_of[chunk_of == key]) for key in distinct]


def _not_stored(name: str, ids: Ints) -> DockError:
    return DockError(
        f"column {name!r} is not stored for rows {ids[:3].tolist()}", "let the put or an earlier stage write it"
    )


def _column(
    name: str, runs: list[Run], chunks: Mapping[int, StoredColumns], n: int, allocate: Allocate | None
) -> Column:
    if len(runs) == 1 and allocate is None and runs[0].lies_together:
        return slice_rows(chunks[runs[0].chunk][name], int(runs[0].places[0]), n)
    sources = [run.of_base(chunks[run.chunk][name]) for run in runs]
    first = sources[0][0]
    allocate = allocate or (lambda _, shape, dtype: np.empty(shape, dtype))
    if first.offsets is None:
        out = allocate(name, (n, *first.values.shape[1:]), first.values.dtype)
        for column, run in sources:
            _copy_fixed(column.values, out, run)
        return Column(out, None, first.is_text)
    lengths = np.empty(n, np.int64)
    for column, run in sources:
        lengths[run.positions] = column.offsets[run.places + 1] - column.offsets[run.places]  # type: ignore[index]
    offsets = np.zeros(n + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    out = allocate(name, (int(offsets[-1]), *first.values.shape[1:]), first.values.dtype)
    for column, run in sources:
        _copy_jagged(column, out, offsets, run)
    return Column(out, offsets, first.is_text)


def slice_rows(column: Column, start: int, n: int) -> Column:
    """Return rows `start` to `start + n` as views."""
    if start + n > column.rows:
        raise DockError(f"a chunk of {column.rows} rows was said to have rows {start} to {start + n}")
    return column.slice(start, n)


def _copy_fixed(values: Array, out: Array, run: Run) -> None:
    if not run.goes_together:
        out[run.positions] = values[run.places]
        return
    target = out[run.positions[0] : run.positions[-1] + 1]
    if run.lies_together:
        target[...] = values[run.places[0] : run.places[-1] + 1]
    else:
        np.take(values, run.places, axis=0, out=target, mode="clip")  # "raise" would copy through a buffer


def _copy_jagged(column: Column, out: Array, offsets: Ints, run: Run) -> None:
    assert column.offsets is not None
    positions, places = run.positions, run.places
    if run.goes_together and run.lies_together:
        start, end = column.offsets[places[0]], column.offsets[places[-1] + 1]
        out[offsets[positions[0]] : offsets[positions[-1] + 1]] = column.values[start:end]
        return
    starts, ends = column.offsets[places], column.offsets[places + 1]
    targets = offsets[positions]
    if int((ends - starts).sum()) >= LONG_ROW * len(places):
        for to, start, end in zip(targets.tolist(), starts.tolist(), ends.tolist()):
            out[to : to + end - start] = column.values[start:end]
        return
    lengths = ends - starts
    inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    out[np.repeat(targets, lengths) + inside] = column.values[np.repeat(starts, lengths) + inside]
