"""The ledger's records: what was written, what was granted, what is held."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.batch import GROUP, ID, LENGTH, VERSION, Batch
from tidemill.dock.ledger.counts import Counts
from tidemill.dock.net.compact import distinct
from tidemill.errors import DockError

Ints = npt.NDArray[np.int64]

GROUP_SIZE = "group_size"  # optional int32 column of a put: how many rows the group will have
META = (ID, GROUP, VERSION, LENGTH)  # columns that live in the ledger and come with every lease
NO_VERSION = -1  # no weights have been used for the row yet: it cannot be stale


@dataclass(frozen=True, slots=True)
class Written:
    """What a put or a commit wrote: the columns' names, the chunk that holds them, and columns that the ledger
    keeps."""

    columns: tuple[str, ...] = ()
    chunk: int = -1  # -1: no bytes
    nbytes: int = 0
    version: npt.NDArray[np.int32] | None = None
    length: npt.NDArray[np.int32] | None = None
    score: npt.NDArray[np.float32] | None = None  # the watched column
    counts: Counts | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one part of each row is: its chunk (-1: none) and its place in it. Where all are adjacent in one chunk,
    as one put or commit wrote them, both are single numbers: that chunk, and the first row's place."""

    part: int
    chunks: Ints | int
    places: npt.NDArray[np.int32] | int

    @property
    def keys(self) -> list[int]:
        """Return the chunks that occur."""
        if isinstance(self.chunks, int):
            return [self.chunks]
        return [key for key in distinct(self.chunks) if key >= 0]

    def of_rows(self, rows: int) -> tuple[Ints, npt.NDArray[Any]]:
        """Return chunk and place of each row."""
        if isinstance(self.chunks, int):
            first = int(self.places)
            return np.full(rows, self.chunks), np.arange(first, first + rows, dtype=np.int32)
        assert not isinstance(self.places, int)
        return self.chunks, self.places


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease as granted, valid until the ledger's next step unless `owned`. Where two pieces hold the same column
    of a row, the later one is newer."""

    lease: int
    deadline: float
    columns: tuple[str, ...]
    rows: int
    meta: Mapping[str, npt.NDArray[Any]]  # columns that the ledger keeps: id, group, version, length
    pieces: list[Piece]

    def owned(self) -> Grant:
        """Return a copy that does not depend on the ledger's table, of which the arrays may be views."""
        return replace(self, meta={name: array.copy() for name, array in self.meta.items()})

    @property
    def ids(self) -> Ints:
        return self.meta[ID]

    @property
    def group(self) -> Ints:
        return self.meta[GROUP]


@dataclass(slots=True)
class HeldLease:
    stage: int
    slots: Ints
    deadline: float
    columns: tuple[str, ...]
    owner: bytes = b""  # its holder, where the end of that process would be noticed
    since: float = 0.0
    where: slice | Ints | None = None  # the same rows, as a slice of the table where they are one
    twin: int = 0  # another lease on the same rows: a straggler's or its replacement's
    is_replay: bool = False  # on rows that are kept, which it does not consume


def split(rows: Batch, read_somewhere: Collection[str], watch: str) -> tuple[Written, Batch]:
    """Split `rows` into what the ledger must know and the columns to store, which some stage reads."""
    stored = rows.select(name for name in rows if name in read_somewhere and name not in META)
    names = tuple(name for name in rows if name != GROUP_SIZE)
    score = rows[watch].values if watch in rows and _is_scalar(rows, watch) else None
    return (
        Written(
            columns=names,
            nbytes=stored.nbytes,
            version=_whole(rows, VERSION, np.int32),
            length=_whole(rows, LENGTH, np.int32),
            score=None if score is None else score.astype(np.float32),
        ),
        stored,
    )


def entry(rows: Batch, source: Collection[str]) -> tuple[Ints, Ints, Ints | None]:
    """Check and return the ids, groups and group sizes of a put."""
    missing = [name for name in (ID, GROUP, *source) if name not in rows]
    if missing:
        raise DockError(f"rows put into the dock lack {', '.join(missing)}; they have {', '.join(rows) or 'nothing'}")
    ids, group = _whole(rows, ID, np.int64), _whole(rows, GROUP, np.int64)
    assert ids is not None and group is not None
    return ids, group, _whole(rows, GROUP_SIZE, np.int64)


def _whole(rows: Batch, name: str, dtype: type) -> npt.NDArray[Any] | None:
    if name not in rows:
        return None
    values = rows[name].values
    if not _is_scalar(rows, name) or values.dtype.kind not in "iu":
        raise DockError(f"column {name!r} must hold one whole number per row, got {values.dtype}")
    return values.astype(dtype)


def _is_scalar(rows: Batch, name: str) -> bool:
    column = rows[name]
    return column.offsets is None and column.values.ndim == 1
