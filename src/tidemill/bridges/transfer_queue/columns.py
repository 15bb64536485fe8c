"""Fields of a TensorDict as columns of a chunk, and back. Values are copied once, straight to their place; rows are
never padded.

A column's name says how its values lie: `float32:reward`, `text:prompt` (UTF-8), `object:info` (packed objects), or
`ragged.float32:image` with `shape:image`, for rows that differ in more than their first dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidemill.bridges.transfer_queue.meta.schema import is_simple, jagged_offsets, name_of
from tidemill.bridges.transfer_queue.objects import packed
from tidemill.dock.keyed.client import Chunk
from tidemill.dock.ledger.records import Ints
from tidemill.dock.store import chunk as chunks

Bytes = npt.NDArray[np.uint8]
TEXT, OBJECT, RAGGED, SHAPE = "text", "object", "ragged.", "shape"
_BY_SIZE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """One column of a chunk to be: how it lies, and what writes its values to their place."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of all values
    fill: Callable[[Bytes], None]
    offsets: Ints | None = None

    @property
    def layout(self) -> chunks.Layout:
        rows = -1 if self.offsets is None else len(self.offsets) - 1
        return self.name, self.dtype, self.shape, self.name.startswith(f"{TEXT}:"), rows, -1


def chunk_of(data: Mapping[str, Any], n: int) -> Chunk:
    """Return the chunk that holds these fields of n rows."""
    columns = [column for name, value in data.items() for column in _columns(name, value, n)]
    plan = chunks.plan_of(tuple(column.layout for column in columns))

    def fill(target: Bytes) -> None:
        chunks.begin(plan, target)
        for column, place in zip(columns, plan.places):
            values, offsets = chunks.room(plan, place, target)
            if len(values):
                column.fill(values)
            if offsets is not None and column.offsets is not None:
                offsets[:] = column.offsets

    return Chunk(plan.nbytes, fill)


def _columns(name: str, value: Any, n: int) -> list[StoredColumn]:
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return [_tensor_column(f"{name_of(value.dtype)}:{name}", value)]
    if isinstance(value, torch.Tensor) and is_simple(value):
        offsets = jagged_offsets(value).cpu().numpy().astype(np.int64)
        return [_tensor_column(f"{name_of(value.dtype)}:{name}", value.values(), offsets)]
    return _columns_of_rows(name, rows_of(value, n))


def rows_of(value: Any, n: int) -> list[Any]:
    """Return a field's rows, each by itself."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return list(value.unbind())
    if isinstance(value, torch.Tensor | list | tuple):
        return list(value)
    return list(value.tolist()) if hasattr(value, "tolist") else [value[i] for i in range(n)]


def _tensor_column(name: str, values: torch.Tensor, offsets: Ints | None = None) -> StoredColumn:
    values = values.detach()

    def fill(target: Bytes) -> None:
        torch.from_numpy(target).view(values.dtype).view(values.shape).copy_(values)

    return StoredColumn(name, _numpy_type(values.dtype), tuple(values.shape), fill, offsets)


def _columns_of_rows(name: str, rows: Sequence[Any]) -> list[StoredColumn]:
    are_tensors = bool(rows) and all(isinstance(row, torch.Tensor) and not row.is_nested for row in rows)
    if are_tensors and len({(row.dtype, row.dim()) for row in rows}) == 1:
        return _tensor_rows(name, rows)
    if all(type(row) is str for row in rows):
        return [_bytes_column(f"{TEXT}:{name}", [row.encode() for row in rows])]
    return [_bytes_column(f"{OBJECT}:{name}", [packed(row) for row in rows])]


def _tensor_rows(name: str, rows: Sequence[torch.Tensor]) -> list[StoredColumn]:
    first, kind = rows[0], name_of(rows[0].dtype)
    dtype = _numpy_type(first.dtype)

    def fill(target: Bytes) -> None:
        out, at = torch.from_numpy(target).view(first.dtype), 0
        for row in rows:
            out[at : at + row.numel()].view(row.shape).copy_(row.detach())
            at += row.numel()

    if first.dim() == 0:
        return [StoredColumn(f"{kind}:{name}", dtype, (len(rows),), fill)]
    if len({row.shape[1:] for row in rows}) == 1:
        total = sum(len(row) for row in rows)
        return [StoredColumn(f"{kind}:{name}", dtype, (total, *first.shape[1:]), fill, _offsets(map(len, rows)))]
    total, offsets = sum(row.numel() for row in rows), _offsets(row.numel() for row in rows)
    shapes = torch.tensor([list(row.shape) for row in rows])
    ragged = StoredColumn(f"{RAGGED}{kind}:{name}", dtype, (total,), fill, offsets)
    return [ragged, _tensor_column(f"{SHAPE}:{name}", shapes)]


def _bytes_column(name: str, rows: Sequence[bytes]) -> StoredColumn:
    offsets = _offsets(map(len, rows))

    def fill(target: Bytes) -> None:
        out = memoryview(target.data)
        for (start, end), row in zip(pairwise(offsets.tolist()), rows):
            out[start:end] = row

    return StoredColumn(name, np.dtype(np.uint8), (int(offsets[-1]),), fill, offsets)


def _offsets(lengths: Iterable[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.fromiter(lengths, np.int64))]).astype(np.int64)


def _numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return a type of numpy with values of this size: for bfloat16 and others numpy has none."""
    name = name_of(dtype)
    return np.dtype(name) if name in _NUMPY else np.dtype(_BY_SIZE[dtype.itemsize])


_NUMPY = {"bool", "float16", "float32", "float64", "complex64", "complex128"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
