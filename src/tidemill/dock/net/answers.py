"""Converts between the ledger's records and messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.batch import GROUP, ID, LENGTH, VERSION
from tidemill.dock.api import LeaseExpired, Progress
from tidemill.dock.keyed.partition import Absent
from tidemill.dock.ledger.records import Grant
from tidemill.dock.net import messages as m
from tidemill.dock.net.compact import pack
from tidemill.dock.store.catalog import Catalog
from tidemill.dock.store.segment import SegmentGone
from tidemill.errors import DockError


def granted(grant: Grant, now: float, catalog: Catalog) -> m.Granted:
    keys: dict[int, None] = {}
    pieces = []
    for piece in grant.pieces:
        keys.update(dict.fromkeys(piece.keys))
        where = [at if isinstance(at, int) else pack(at) for at in (piece.chunks, piece.places)]
        pieces.append(m.WirePiece(piece.part, *where))
    return m.Granted(
        rows=grant.rows,
        lease=grant.lease,
        lease_s=grant.deadline - now,
        columns=grant.columns,
        ids=pack(grant.meta[ID]),
        group=pack(grant.meta[GROUP]),
        version=pack(grant.meta[VERSION]),
        length=pack(grant.meta[LENGTH]),
        pieces=tuple(pieces),
        chunks=tuple(catalog.at(key) for key in keys),
    )


def progress_reply(progress: Progress) -> m.ProgressReply:
    return m.ProgressReply(progress.pending, progress.ready, progress.leased)


def refusal(error: Exception) -> m.Refused:
    if not isinstance(error, DockError):
        return m.Refused("error", f"the ledger cannot read this message: {error}", "use matching versions")
    kinds = {LeaseExpired: "lease", SegmentGone: "gone", Absent: "absent"}
    return m.Refused(kinds.get(type(error), "error"), error.message, error.remedy)


def ints(raw: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(raw, np.int64)


def of_rows(raw: bytes | None, dtype: Any, rows: int) -> npt.NDArray[Any] | None:
    if raw is None:
        return None
    array = np.frombuffer(raw, dtype)
    if len(array) != rows:
        raise DockError(f"{len(array)} values came for {rows} rows")
    return array
