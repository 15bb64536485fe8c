"""RemoteDock: a dock client that renews its leases. Bytes are written to and read from this node's shared memory;
only metadata goes to the ledger, one round trip per operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.batch import GROUP, ID, LENGTH, VERSION, Batch
from tidemill.dock.address import Address
from tidemill.dock.api import DockState, LeaseExpired, Progress, Until, Want
from tidemill.dock.keyed.partition import Absent
from tidemill.dock.lease import LeaseRenewer, TakenLease
from tidemill.dock.ledger.counts import Counts, Tallied
from tidemill.dock.ledger.records import Grant, Piece, Written, entry, split
from tidemill.dock.net import messages as m
from tidemill.dock.net.caller import Caller
from tidemill.dock.net.compact import unpack
from tidemill.dock.net.wire import new_owner
from tidemill.dock.store import chunk as chunks
from tidemill.dock.store.node import Node
from tidemill.dock.store.segment import Bytes, SegmentGone
from tidemill.dock.store.writer import Reservation
from tidemill.errors import DockError
from tidemill.graph import Stage

Stored = TypeVar("Stored")

WAIT_SLICE_S = 1.0  # longer waits are split into pieces, so that a lost ledger is noticed
LOST_PAUSE_S = 0.02  # before asking again for rows whose bytes were lost: the ledger learns of it in a moment
LEDGER_PATIENCE_S = 30.0  # a ledger that does not answer for this long is reported; it should be back in under two


class RemoteDock:
    def __init__(self, address: Address, node: str | None = None, renews: bool = False) -> None:
        """`renews`: keep every lease taken here alive until it is committed, abandoned or garbage-collected."""
        self._address = address
        self.written_bytes = self.read_bytes = 0  # bytes of samples, by this process; 0 in a driver
        self._heard = 0  # number of the last answer with counts that arrived here
        self._owner = new_owner()
        self._local = threading.local()
        self._callers: dict[threading.Thread, Caller] = {}
        setup = self.ask(m.AskSetup())
        self.stages = tuple(Stage(*stage) for stage in setup.stages)
        self._source, self._watch, self._replicas = setup.source, setup.watch, setup.replicas
        self.keyed_lease_s: float = setup.keyed_lease_s
        self._read_somewhere = frozenset(column for stage in self.stages for column in stage.reads)
        self._node = Node(address.token, node, self._directory)
        self._renewer = LeaseRenewer(self, setup.lease_s) if renews else None

    # -- the dock's interface ----------------------------------------------------------------------------------------

    def put(self, rows: Batch, tag: str = "") -> None:
        ids, group, sizes = entry(rows, self._source)
        written, stored = split(rows, self._read_somewhere, self._watch)
        packed_sizes = None if sizes is None else sizes.tobytes()

        def message(outputs: m.Outputs) -> m.Put:
            return m.Put(ids.tobytes(), group.tobytes(), packed_sizes, outputs, tag, WAIT_SLICE_S)

        self._write(written, stored, message)

    def take(self, stage: str, want: Want, wait: float = 0.0) -> TakenLease | None:
        started = now = time.monotonic()
        deadline = started + wait
        while True:
            slice_s = min(max(0.0, deadline - now), WAIT_SLICE_S)
            answer = self.ask(m.Take(stage, want, slice_s, now - started), wait_s=slice_s)
            if isinstance(answer, m.Granted):
                lease = self._open(answer)
                if lease is not None:
                    return lease
            now = time.monotonic()
            if now >= deadline:
                return None

    def advance(self, version: int) -> None:
        self.ask(m.Advance(version))

    def progress(self, stage: str, tag: str | None = None, until: Until | None = None, wait: float = 0.0) -> Progress:
        deadline = time.monotonic() + wait
        while True:
            slice_s = min(max(0.0, deadline - time.monotonic()), WAIT_SLICE_S)
            answer: m.ProgressReply = self.ask(m.AskProgress(stage, tag, until, slice_s), wait_s=slice_s)
            progress = Progress(answer.pending, answer.ready, answer.leased)
            if until is None or progress.has_come_to(until) or time.monotonic() >= deadline:
                return progress

    def finished(self, stage: str, tag: str) -> list[int]:
        groups: list[int] = np.frombuffer(self.ask(m.AskFinished(stage, tag)).ids, np.int64).tolist()
        return groups

    def retag(self, groups: Sequence[int], tag: str) -> None:
        self.ask(m.Retag(np.asarray(groups, np.int64).tobytes(), tag))

    def state(self) -> DockState:
        record = self.figures()
        known = {name: record[name] for name in DockState.__dataclass_fields__ if name in record}
        return msgspec.convert(known, DockState)

    def figures(self) -> dict[str, Any]:
        """Return everything the ledger counts, as plain values."""
        record: dict[str, Any] = self.ask(m.AskState()).state
        return record

    def counted(self) -> Tallied:
        answer: m.CountedReply = self.ask(m.AskCounted(self._heard))
        self._heard = answer.number
        return Tallied(answer.number, answer.sums, answer.means)

    def missing(self) -> list[int]:
        """Return ids whose bytes were lost with a warehouse since the last call: their producer may put them again."""
        ids: list[int] = np.frombuffer(self.ask(m.Missing()).ids, np.int64).tolist()
        return ids

    def leave(self) -> None:
        """Wake all threads that wait for an answer, and send nothing more. For a dock that is about to end, or has:
        otherwise its ledger is waited for as if it would come back. From any thread."""
        self._node.leave()
        for caller in list(self._callers.values()):
            caller.close()

    @property
    def leases(self) -> int:
        """Return how many leases are being renewed."""
        return 0 if self._renewer is None else len(self._renewer)

    def close(self) -> None:
        if self._renewer is not None:
            self._renewer.close()
        self._node.close()
        for caller in list(self._callers.values()):
            caller.close()
        self._callers.clear()

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(self, message: m.Message, wait_s: float = 0.0) -> Any:
        caller: Caller | None = getattr(self._local, "caller", None)
        if caller is None:
            caller = self._local.caller = self._new_caller()
        try:
            answer = caller.ask(message, within_s=wait_s + LEDGER_PATIENCE_S)
        except TimeoutError:
            raise DockError(
                f"the dock's ledger at {self._address.ledger} has not answered for {LEDGER_PATIENCE_S:.0f} s",
                "check that its process runs and that the token is this dock's",
            ) from None
        if isinstance(answer, m.Refused):
            kinds = {"lease": LeaseExpired, "gone": SegmentGone, "absent": Absent}
            raise kinds.get(answer.kind, DockError)(answer.message, answer.remedy)
        return answer

    def _new_caller(self) -> Caller:
        """Return this thread's connection. Those of ended threads are closed afterwards: a process whose last
        connection closes counts as dead."""
        where = self._address
        caller = Caller(where.token, where.ledger, where.local, self._owner)
        self._callers[threading.current_thread()] = caller
        for thread in [thread for thread in list(self._callers) if not thread.is_alive()]:
            ended = self._callers.pop(thread, None)
            if ended is not None:  # unless another thread has closed it
                ended.close()
        return caller

    def _directory(self) -> tuple[m.Announce, ...]:
        warehouses: tuple[m.Announce, ...] = self.ask(m.AskSetup()).warehouses
        return warehouses

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, written: Written, stored: Batch, message: Any) -> None:
        """Write the bytes, then send the metadata to the ledger; repeat both when the bytes were lost in between."""
        if not len(stored):
            self._tell_written(message(_outputs(written, 0, ())))
            return
        plan = chunks.plan(stored)
        self.store(
            [(plan.nbytes, lambda target: chunks.write(stored, plan, target))],
            lambda copies: self._tell_written(message(_outputs(written, plan.nbytes, copies[0]))),
        )

    def store(
        self, chunks: Sequence[tuple[int, Callable[[Bytes], None]]], tell: Callable[[list[tuple[m.Copy, ...]]], Stored]
    ) -> Stored:
        """Write chunks, each given by its size and by what writes it; then let `tell` tell the ledger where the copies
        of each are. All is done again when the bytes were lost in between."""
        while True:
            reservations: list[Reservation] = []
            try:
                copies = []
                for nbytes, fill in chunks:
                    reservations.append(self._node.reserve(nbytes))
                    fill(reservations[-1].target)
                    copies.append(self._node.copies(reservations[-1], nbytes, self._replicas))
                answer = tell(copies)
                self.written_bytes += sum(nbytes for nbytes, _ in chunks)
                return answer
            except SegmentGone:
                time.sleep(LOST_PAUSE_S)
                self._node.refresh()
            finally:
                for reservation in reservations:
                    self._node.settle(reservation)

    def _tell_written(self, message: m.Put | m.Commit) -> None:
        started = time.monotonic()
        while isinstance(self.ask(message, wait_s=WAIT_SLICE_S), m.Nothing):
            assert isinstance(message, m.Put)  # the dock is full: the repeated request is what waits
            message.waited_s = time.monotonic() - started

    def commit_lease(self, grant: Grant, outputs: Batch, drop: Sequence[int], counts: Counts | None) -> None:
        written, stored = split(outputs, self._read_somewhere, self._watch)
        dropped = np.asarray(drop, np.int64).tobytes()
        self._write(written, stored, lambda outputs: m.Commit(grant.lease, outputs, dropped, counts))

    def renew_lease(self, grant: Grant) -> None:
        self.ask(m.Renew(grant.lease))

    def abandon_lease(self, grant: Grant) -> None:
        self.ask(m.Abandon(grant.lease))

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, chunk: m.ChunkAt) -> chunks.StoredChunk:
        """Open a chunk, which a warehouse of this node pulls where it has no copy. Raises SegmentGone when its bytes
        are no longer anywhere."""
        return chunks.StoredChunk(self.raw(chunk))

    def raw(self, chunk: m.ChunkAt) -> Bytes:
        """The same, as bytes."""
        self.read_bytes += chunk.nbytes
        return self._node.read(chunk)

    def _open(self, granted: m.Granted) -> TakenLease | None:
        """Return the lease with its chunks open; None when their bytes were lost, and the rows given back."""
        try:
            stored = {chunk.key: chunks.StoredChunk(self._node.read(chunk)) for chunk in granted.chunks}
        except SegmentGone:
            self.ask(m.Abandon(granted.lease))
            time.sleep(LOST_PAUSE_S)
            self._node.refresh()
            return None
        self.read_bytes += sum(chunk.nbytes for chunk in granted.chunks)
        return TakenLease(self, _grant(granted), stored, self._renewer)


def _outputs(written: Written, nbytes: int, copies: tuple[m.Copy, ...]) -> m.Outputs:
    arrays = (written.version, written.length, written.score)
    return m.Outputs(written.columns, nbytes, copies, *(None if a is None else a.tobytes() for a in arrays))


def _grant(granted: m.Granted) -> Grant:
    deadline, pieces = time.monotonic() + granted.lease_s, [_piece(piece, granted.rows) for piece in granted.pieces]
    return Grant(granted.lease, deadline, granted.columns, granted.rows, GrantedMeta(granted), pieces)


class GrantedMeta(Mapping[str, npt.NDArray[Any]]):
    """The columns that the ledger keeps, unpacked on first use."""

    __slots__ = ("_granted", "_unpacked")

    def __init__(self, granted: m.Granted) -> None:
        self._granted = granted
        self._unpacked: dict[str, npt.NDArray[Any]] = {}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._unpacked:
            packed, dtype = _PACKED[name]
            self._unpacked[name] = unpack(getattr(self._granted, packed), dtype, self._granted.rows)
        return self._unpacked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_PACKED)

    def __len__(self) -> int:
        return len(_PACKED)


_PACKED: dict[str, tuple[str, type]] = {
    ID: ("ids", np.int64),
    GROUP: ("group", np.int64),
    VERSION: ("version", np.int32),
    LENGTH: ("length", np.int32),
}


def _piece(piece: m.WirePiece, n: int) -> Piece:
    if isinstance(piece.chunks, int) or isinstance(piece.places, int):
        return Piece(piece.part, int(piece.chunks), int(piece.places))
    return Piece(piece.part, unpack(piece.chunks, np.int64, n), unpack(piece.places, np.int32, n))


def connect(address: Address | str | Path, node: str | None = None) -> RemoteDock:
    """Connect to a dock that runs elsewhere: `address` is its server's address, that as JSON, or the dock's folder."""
    return RemoteDock(address if isinstance(address, Address) else Address.find(address), node)
