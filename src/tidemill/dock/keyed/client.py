"""KeyedDock: a process's side of a keyed table. Bytes go to and come from this node's shared memory; what is where is
one round trip to the ledger."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.dock.address import Address
from tidemill.dock.client import LOST_PAUSE_S, RemoteDock
from tidemill.dock.keyed.partition import FieldKind
from tidemill.dock.ledger.records import Ints
from tidemill.dock.net import keyed_messages as k
from tidemill.dock.net import messages as m
from tidemill.dock.net.compact import unpack
from tidemill.dock.net.parts import Copy, Message, Outputs
from tidemill.dock.store import chunk as chunks
from tidemill.dock.store.segment import Bytes, SegmentGone
from tidemill.errors import DockError

RENEWALS = 4  # in the life of a claim on fetched rows
WAIT_SLICE_S = 1.0  # longer waits are split, so that a lost ledger is noticed


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk to write: how many bytes, and what writes them."""

    nbytes: int
    fill: Callable[[Bytes], None]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows and what they are like. `tags` None: no row has any."""

    indexes: Ints
    kinds: list[FieldKind]
    ready: npt.NDArray[np.int8]
    tags: list[bytes] | None


@dataclass(frozen=True, slots=True)
class Found:
    """Where values are: for each field, each row's chunk and place; and the chunks."""

    rows: int
    fields: dict[str, tuple[Ints, npt.NDArray[np.int32]]]
    chunks: Mapping[int, chunks.StoredChunk]


class KeyedDock:
    def __init__(self, address: Address, node: str | None = None) -> None:
        self._dock = RemoteDock(address, node)
        self._stop = threading.Event()
        self._renewer: threading.Thread | None = None
        self._lock = threading.Lock()

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(
        self,
        partition: str,
        *,
        keys: list[str] | None = None,
        indexes: Ints | None = None,
        rows: int = 0,
        kinds: Sequence[FieldKind] = (),
        chunk: Chunk | None = None,
        tags: list[bytes] | None = None,
        merges: bool = False,
    ) -> Rows:
        """Write fields, tags or both to rows found by key or by number, or to new ones."""
        named = None if indexes is None else indexes.tobytes()

        def tell(copies: list[tuple[Copy, ...]]) -> Rows:
            outputs = Outputs(nbytes=chunk.nbytes, copies=copies[0]) if chunk else Outputs()
            return _rows(self._ask(k.KeyedWrite(partition, keys, named, rows, list(kinds), outputs, tags, merges)))

        return tell([]) if chunk is None else self._dock.store([(chunk.nbytes, chunk.fill)], tell)

    def tag(self, partition: str, indexes: Ints, tags: list[bytes]) -> None:
        self._ask(k.KeyedTag(partition, indexes.tobytes(), tags))

    def reserve(self, partition: str, fields: list[str], rows: int) -> Rows:
        return _rows(self._ask(k.KeyedReserve(partition, fields, rows)))

    def clear(self, partition: str, keys: list[str] | None = None, indexes: Ints | None = None) -> None:
        """Clear rows, or with neither keys nor indexes the whole partition. What is not there is ignored."""
        self._ask(k.KeyedClear(partition, keys, None if indexes is None else indexes.tobytes()))

    # -- looking -----------------------------------------------------------------------------------------------------

    def find(self, partition: str, keys: list[str], creates: bool = False) -> Rows | None:
        """Describe the rows of keys, without those that are not there. None: there is no such partition."""
        answer = self._ask(k.KeyedFind(partition, keys, creates))
        return None if isinstance(answer, m.Nothing) else _rows(answer)

    def look(self, partition: str, fields: list[str] | None = None) -> Rows:
        return _rows(self._ask(k.KeyedLook(partition, fields)))

    def names(self, partition: str, indexes: Ints) -> list[str | None]:
        keys: list[str | None] = self._ask(k.KeyedNames(partition, indexes.tobytes())).keys
        return keys

    def listing(self, partition: str | None = None) -> dict[str, dict[str, bytes]]:
        """Return the tags of each key of each partition."""
        found: dict[str, dict[str, bytes]] = self._ask(k.KeyedList(partition)).partitions
        return found

    def partitions(self) -> list[str]:
        names: list[str] = self._ask(k.KeyedPartitions()).keys
        return names

    def marks(
        self, partition: str, task: str | None = None, fields: list[str] | None = None
    ) -> tuple[Ints, npt.NDArray[np.int8]] | None:
        """Return rows and whether the task has consumed them, or which of the fields they have."""
        answer = self._ask(k.KeyedMarks(partition, task, fields))
        if isinstance(answer, m.Nothing):
            return None
        indexes = np.frombuffer(answer.indexes, np.int64)
        marks = np.frombuffer(answer.marks, np.int8)
        return indexes, marks if task is not None else marks.reshape(len(indexes), answer.columns)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(
        self, partition: str, *, keys: list[str] | None = None, indexes: Ints | None = None, fields: list[str] | None
    ) -> Found | None:
        """Find the values of rows. By key, rows and fields that are not there are left out; by number, they are an
        error. None: there is none of the keys."""
        named = None if indexes is None else indexes.tobytes()
        while True:
            answer = self._ask(k.KeyedRead(partition, keys, named, fields))
            if isinstance(answer, m.Nothing):
                return None
            try:
                stored = {chunk.key: self._dock.read(chunk) for chunk in answer.chunks}
            except SegmentGone:  # written anew or cleared meanwhile
                time.sleep(LOST_PAUSE_S)
                continue
            n = answer.rows
            places = {f.name: (unpack(f.chunks, np.int64, n), unpack(f.places, np.int32, n)) for f in answer.fields}
            return Found(n, places, stored)

    # -- consuming ---------------------------------------------------------------------------------------------------

    def fetch(
        self, partition: str, task: str, fields: list[str], rows: int, config: bytes, wait_s: float
    ) -> Rows | None:
        """Take rows that the task has not consumed; None: too few came within the time."""
        self._renew()
        deadline = time.monotonic() + wait_s
        while True:
            slice_s = min(max(0.0, deadline - time.monotonic()), WAIT_SLICE_S)
            answer = self._dock.ask(k.KeyedFetch(partition, task, fields, rows, config, slice_s), wait_s=slice_s)
            if not isinstance(answer, m.Nothing):
                return _rows(answer)
            if time.monotonic() >= deadline:
                return None

    def settle(self, partition: str | None = None, indexes: Ints | None = None) -> None:
        """Say that the work on fetched rows is done; with no arguments, on all."""
        self._ask(k.KeyedSettle(partition, None if indexes is None else indexes.tobytes()))

    def reset(self, partition: str, task: str | None = None) -> None:
        self._ask(k.KeyedReset(partition, task))

    # -- whole tables ------------------------------------------------------------------------------------------------

    def save(self) -> tuple[bytes, dict[int, Bytes]]:
        """Return the table's state and the bytes of all its chunks."""
        while True:
            answer = self._ask(k.KeyedSave())
            try:
                return answer.state, {chunk.key: self._dock.raw(chunk) for chunk in answer.chunks}
            except SegmentGone:
                time.sleep(LOST_PAUSE_S)

    def load(self, state: bytes, stored: Mapping[int, Bytes]) -> None:
        """Replace the table by what was saved."""

        def filler(raw: Bytes) -> Callable[[Bytes], None]:
            return lambda target: np.copyto(target, raw)

        def tell(copies: list[tuple[Copy, ...]]) -> None:
            placed = [Outputs(nbytes=len(raw), copies=where) for raw, where in zip(stored.values(), copies)]
            self._ask(k.KeyedLoad(state, dict(zip(stored, placed))))

        self._dock.store([(len(raw), filler(raw)) for raw in stored.values()], tell)

    # -- life --------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        return self._dock.figures()

    def close(self, is_done: bool = True) -> None:
        """Leave. `is_done`: what was fetched has been worked on; else it is given to others."""
        self._stop.set()
        if is_done and self._renewer is not None:
            with suppress(DockError):  # the ledger is gone, with what it knew of our claims
                self.settle()
        self._dock.close()

    def _ask(self, message: Message) -> Any:
        return self._dock.ask(message)

    def _renew(self) -> None:
        with self._lock:
            if self._renewer is None:
                every_s = self._dock.keyed_lease_s / RENEWALS
                arguments = weakref.ref(self._dock), self._stop, every_s
                self._renewer = threading.Thread(target=_keep, args=arguments, name="claims", daemon=True)
                self._renewer.start()


def _keep(dock: weakref.ref[RemoteDock], stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        alive = dock()
        if alive is None:
            return
        with suppress(DockError):  # the ledger is restarting, or gone
            alive.ask(k.KeyedKeep())
        del alive


def _rows(answer: k.KeyedRows) -> Rows:
    indexes, ready = np.frombuffer(answer.indexes, np.int64), np.frombuffer(answer.ready, np.int8)
    return Rows(indexes, answer.kinds, ready, answer.tags)
