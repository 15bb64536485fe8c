"""Chunk: one batch as a self-describing run of bytes. It can be at any address, so it is moved without being read.

    [magic][header length][header: name, dtype, shape, places][pad] [column values][pad] [offsets][pad] [index][pad] ...

A group column is stored once per group, with an index that maps rows to groups. Every array starts at a multiple of 64
bytes from the chunk's start. There is no other padding.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.batch import Batch, Column, GroupColumn
from tidemill.errors import DockError

ALIGN = 64
_PREFIX = struct.Struct("<II")
_MAGIC = 0x74_6D_63_32
_OFFSET, _INDEX = np.dtype(np.int64), np.dtype(np.int32)
Bytes = npt.NDArray[np.uint8]
_KINDS = "biufc"  # bool, int, unsigned, float, complex: types that can be copied as raw bytes


class ColumnPlace(msgspec.Struct, array_like=True, frozen=True):
    name: str
    dtype: str
    tail: tuple[int, ...]  # shape of one value
    is_text: bool
    count: int  # values
    at: int  # of the values, from the end of the header's page
    offsets_at: int  # -1: one value per row
    kept: int  # rows that lie here
    index_at: int  # -1: one entry per row
    rows: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    header: bytes
    places: list[ColumnPlace]
    body_at: int
    nbytes: int


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(list[ColumnPlace]).decode


# Of a column: name, dtype and shape of its values, is it text, rows where they are jagged (else -1), entries of an
# index (else -1).
Layout = tuple[str, np.dtype[Any], tuple[int, ...], bool, int, int]


def plan(batch: Batch) -> ChunkPlan:
    """Plan where everything goes, before a byte is written."""
    return plan_of(tuple((name, *_shape(column.base), _index_rows(column)) for name, column in batch.items()))


def _shape(column: Column) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    rows = -1 if column.offsets is None else len(column.offsets) - 1
    return column.values.dtype, column.values.shape, column.is_text, rows


def _index_rows(column: Column) -> int:
    return -1 if column.index is None else len(column.index)


@lru_cache(maxsize=256)  # small puts mostly have the last one's shape
def plan_of(shapes: tuple[Layout, ...]) -> ChunkPlan:
    """Plan for columns that are somewhere else, such as on a device: `begin` and `room` then say where they go."""
    places = []
    at = 0
    for name, dtype, shape, is_text, jagged_rows, index_rows in shapes:
        if dtype.kind not in _KINDS or not dtype.isnative:
            raise DockError(f"column {name!r} has dtype {dtype}, which cannot be stored", "use numbers")
        start, at = at, _aligned(at + math.prod(shape) * dtype.itemsize)
        offsets_at = -1
        if jagged_rows >= 0:
            offsets_at, at = at, _aligned(at + 8 * (jagged_rows + 1))
        index_at = -1
        if index_rows >= 0:
            index_at, at = at, _aligned(at + _INDEX.itemsize * index_rows)
        kept = shape[0] if jagged_rows < 0 else jagged_rows
        rows = kept if index_rows < 0 else index_rows
        where = start, offsets_at, kept, index_at, rows
        places.append(ColumnPlace(name, dtype.str, shape[1:], is_text, shape[0], *where))
    header = _encode(places)
    body_at = _aligned(_PREFIX.size + len(header))
    return ChunkPlan(header, places, body_at, body_at + at)


def write(batch: Batch, plan: ChunkPlan, out: npt.NDArray[np.uint8]) -> None:
    """Write with one copy per column, straight to its place."""
    begin(plan, out)
    for place in plan.places:
        column, index = batch[place.name].base, batch[place.name].index
        _put(out, plan.body_at + place.at, column.values)
        if column.offsets is not None:
            _put(out, plan.body_at + place.offsets_at, column.offsets)
        if index is not None:
            _put(out, plan.body_at + place.index_at, index.astype(_INDEX, copy=False))


def begin(plan: ChunkPlan, out: npt.NDArray[np.uint8]) -> None:
    """Write the header."""
    out.data[: _PREFIX.size + len(plan.header)] = _PREFIX.pack(_MAGIC, len(plan.header)) + plan.header


def room(plan: ChunkPlan, place: ColumnPlace, out: npt.NDArray[np.uint8]) -> tuple[Bytes, npt.NDArray[np.int64] | None]:
    """Return where a column's values go, as bytes, and where its offsets go."""
    nbytes = math.prod((place.count, *place.tail)) * np.dtype(place.dtype).itemsize
    at = plan.body_at + place.at
    if place.offsets_at < 0:
        return out[at : at + nbytes], None
    first = plan.body_at + place.offsets_at
    return out[at : at + nbytes], out[first : first + 8 * (place.kept + 1)].view(_OFFSET)


def to_bytes(batch: Batch) -> npt.NDArray[np.uint8]:
    """Write the chunk into memory of its own."""
    planned = plan(batch)
    out = np.zeros(planned.nbytes, np.uint8)
    write(batch, planned, out)
    return out


def read(raw: npt.NDArray[np.uint8]) -> Batch:
    """Return the batch as views of `raw`."""
    stored = StoredChunk(raw)
    return Batch({name: stored[name] for name in stored})


class StoredChunk(Mapping[str, Column]):
    """A chunk in place. A column is made when it is used: most takes read each once, and some not all."""

    __slots__ = ("_body_at", "_columns", "_raw", "rows")

    def __init__(self, raw: npt.NDArray[np.uint8]) -> None:
        magic, length = _PREFIX.unpack_from(raw.data)
        if magic != _MAGIC or length > len(raw):
            raise DockError("these bytes are not a chunk")
        self._raw, self._body_at = raw, _aligned(_PREFIX.size + length)
        self.rows, self._columns = _shapes(raw.data[_PREFIX.size : _PREFIX.size + length].tobytes())

    def __getitem__(self, name: str) -> Column:
        dtype, shape, at, offsets_at, is_text, kept, index_at = self._columns[name]
        values: npt.NDArray[Any] = np.ndarray(shape, dtype, self._raw, self._body_at + at)
        offsets: npt.NDArray[Any] | None = None
        if offsets_at >= 0:
            offsets = np.ndarray(kept + 1, _OFFSET, self._raw, self._body_at + offsets_at)
        column = Column(values, offsets, is_text)
        if index_at < 0:
            return column
        return GroupColumn(column, np.ndarray(self.rows, _INDEX, self._raw, self._body_at + index_at))

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


# dtype, shape, place of values and offsets, is it text, rows stored here, place of the index
Shape = tuple[np.dtype[Any], tuple[int, ...], int, int, bool, int, int]


@lru_cache(maxsize=256)  # shapes repeat
def _shapes(header: bytes) -> tuple[int, dict[str, Shape]]:
    places = _decode_header(header)
    shapes = {
        p.name: (np.dtype(p.dtype), (p.count, *p.tail), p.at, p.offsets_at, p.is_text, p.kept, p.index_at)
        for p in places
    }
    return places[0].rows if places else 0, shapes


def _put(out: npt.NDArray[np.uint8], at: int, array: npt.NDArray[Any]) -> None:
    np.copyto(out[at : at + array.nbytes].view(array.dtype).reshape(array.shape), array)


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
