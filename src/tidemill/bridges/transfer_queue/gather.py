"""Makes fields of a TensorDict from stored chunks: one copy, into memory of the caller's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from tidemill.batch import Column
from tidemill.bridges.transfer_queue.columns import OBJECT, RAGGED, SHAPE, TEXT
from tidemill.bridges.transfer_queue.memory import POOL
from tidemill.bridges.transfer_queue.objects import unpacked
from tidemill.dock.keyed.client import Found
from tidemill.dock.ledger.records import Ints
from tidemill.dock.net.compact import distinct, is_range
from tidemill.dock.store.chunk import StoredChunk

_DECODE: dict[str, Callable[[Any], Any]] = {TEXT: lambda raw: str(raw, "utf-8"), OBJECT: unpacked}


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of one chunk: their places in the batch and in the chunk, and the column with their values."""

    kind: str
    column: Column
    positions: Ints
    places: Ints
    shapes: Column | None = None

    @property
    def tail(self) -> tuple[int, ...]:
        """Shape of one value, of which a row has one or several."""
        return tuple(self.column.values.shape[1:])

    @property
    def row_dims(self) -> int:
        return len(self.tail) + (self.column.offsets is not None)


def gathered(found: Found) -> TensorDict:
    fields = {name: _field(name, *where, found.chunks) for name, where in sorted(found.fields.items())}
    return TensorDict(fields, batch_size=found.rows)


def _field(name: str, chunk: Ints, place: Any, stored: Mapping[int, StoredChunk]) -> Any:
    sources = [_source(name, stored[key], chunk, place.astype(np.int64), key) for key in distinct(chunk)]
    first = sources[0]
    is_tensor = first.kind not in _DECODE and not first.kind.startswith(RAGGED)
    if is_tensor and len({source.kind for source in sources}) == 1:
        if all(source.row_dims == 0 for source in sources):
            return _numbers(sources, len(chunk))
        if len({(source.row_dims, _inner(source)) for source in sources}) == 1:
            return _jagged(sources, len(chunk))
    return stacked([value for _, value in sorted(_rows(sources), key=lambda row: row[0])])


def _inner(source: Source) -> tuple[int, ...]:
    """Shape of a row behind its first dimension, which may differ from row to row."""
    return source.tail if source.column.offsets is not None else source.tail[1:]


def _source(name: str, stored: StoredChunk, chunk: Ints, place: Ints, key: int) -> Source:
    kind = _kinds(tuple(stored))[name]
    positions = np.flatnonzero(chunk == key)
    shapes = stored[f"{SHAPE}:{name}"] if kind.startswith(RAGGED) else None
    return Source(kind, stored[f"{kind}:{name}"], positions, place[positions], shapes)


@lru_cache(maxsize=256)
def _kinds(names: tuple[str, ...]) -> dict[str, str]:
    pairs = (name.partition(":") for name in names)
    return {field: kind for kind, _, field in pairs if kind != SHAPE}


# -- tensors ----------------------------------------------------------------------------------------------------------


def _numbers(sources: list[Source], n: int) -> torch.Tensor:
    out = _memory(n, sources[0])
    for source in sources:
        out[_tensor_index(source.positions)] = _values(source)[_tensor_index(source.places)]
    return out


def _jagged(sources: list[Source], n: int) -> torch.Tensor:
    lengths = np.empty(n, np.int64)
    for source in sources:
        offsets = source.column.offsets
        lengths[source.positions] = (
            source.tail[0] if offsets is None else offsets[source.places + 1] - offsets[source.places]
        )
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    inner = _inner(sources[0])
    out = _memory(int(offsets[-1]), sources[0], inner)
    for source in sources:
        values = _values(source).view(-1, *inner)
        for to, start, length in _runs(source, offsets):
            out[to : to + length].copy_(values[start : start + length])
    most, least = (int(lengths.max()), int(lengths.min())) if n else (0, 0)
    return torch.nested.nested_tensor_from_jagged(out, torch.from_numpy(offsets), min_seqlen=least, max_seqlen=most)


def _runs(source: Source, offsets: Ints) -> Iterator[tuple[int, int, int]]:
    """Give (place in the batch, place in the chunk, length), in values: one for rows that lie together in both."""
    held = source.column.offsets
    starts = source.places * source.tail[0] if held is None else held[source.places]
    to, ends = offsets[source.positions], offsets[source.positions + 1]
    if is_range(source.places) and is_range(source.positions):
        yield int(to[0]), int(starts[0]), int(ends[-1] - to[0])
    else:
        yield from zip(to.tolist(), starts.tolist(), (ends - to).tolist())


def _memory(n: int, source: Source, inner: tuple[int, ...] = ()) -> torch.Tensor:
    """Return memory for n values."""
    dtype: torch.dtype = getattr(torch, source.kind)
    nbytes = math.prod((n, *inner)) * dtype.itemsize
    if not nbytes:
        return torch.empty(n, *inner, dtype=dtype)
    return torch.from_numpy(POOL.lend(nbytes)).view(dtype).view(n, *inner)


def _values(source: Source) -> torch.Tensor:
    """Return the stored values as a tensor, which is only read."""
    raw = np.asarray(_Window(source.column.values.reshape(-1).view(np.uint8)))
    return torch.from_numpy(raw).view(getattr(torch, source.kind)).view(source.column.values.shape)


class _Window:
    """Shows a read-only array as writable: torch would warn for each that is not."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _tensor_index(places: Ints) -> Any:
    return slice(int(places[0]), int(places[-1]) + 1) if is_range(places) else torch.from_numpy(places)


# -- rows one by one --------------------------------------------------------------------------------------------------


def _rows(sources: list[Source]) -> Iterator[tuple[int, Any]]:
    for source in sources:
        for position, place in zip(source.positions.tolist(), source.places.tolist()):
            yield position, _row(source, place)


def _row(source: Source, place: int) -> Any:
    column = source.column
    if source.kind in _DECODE:
        assert column.offsets is not None
        return _DECODE[source.kind](column.values[column.offsets[place] : column.offsets[place + 1]].data)
    if source.shapes is None:
        value = np.array(column[place])
        return torch.from_numpy(value.reshape(-1).view(np.uint8)).view(getattr(torch, source.kind)).view(value.shape)
    kind = getattr(torch, source.kind.removeprefix(RAGGED))
    flat = torch.from_numpy(np.array(column[place]).view(np.uint8)).view(kind)
    return flat.view(source.shapes.values[place].tolist())


def stacked(values: list[Any]) -> Any:
    """Return rows as one value: a nested tensor where they fit one, jagged before strided, else as they are."""
    if values and all(isinstance(value, torch.Tensor) for value in values):
        if all(value.dim() == 0 for value in values):
            return torch.stack(values)
        for layout in (torch.jagged, torch.strided):
            try:
                return torch.nested.as_nested_tensor(values, layout=layout)
            except (RuntimeError, TypeError):
                continue
    return NonTensorStack(*values)
