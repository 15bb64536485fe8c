"""The warehouse's process: lends segments to the node's writers, pulls chunks for the node's readers, recycles. It does
not touch the bytes itself: writers and readers of the node map its segments, other nodes stream from them."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tidemill.dock.net import messages as m
from tidemill.dock.net.caller import Link
from tidemill.dock.net.stream import Puller, StreamServer
from tidemill.dock.net.wire import address_of, listen
from tidemill.dock.net.wire_server import WireServer
from tidemill.dock.setup import DockSetup
from tidemill.dock.store.arena import Arena, choose_place, claim, dock_name, is_own_folder, remove_orphans, spill_name
from tidemill.dock.store.segment import SegmentGone, Views
from tidemill.dock.store.writer import Reservation, Writer
from tidemill.errors import DockError

log = logging.getLogger("tidemill.dock")

TICK_S = 0.05
REPORT_S = 0.2  # heartbeat to the ledger; also how soon a restarted ledger is noticed
LEND_WAIT_S = 1.0  # a writer that finds memory full asks again after this
PREPARED_SEGMENTS = 4
SPILL_AGAIN_S = 5.0  # after the disk refused
TOUCH_S = 60.0


@dataclass(slots=True)
class Pull:
    """A chunk that is being pulled, and everybody who waits for it."""

    chunk: m.ChunkAt
    reservation: Reservation
    askers: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class ParkedLend:
    client: bytes
    seq: bytes
    nbytes: int
    deadline: float


class WarehouseServer:
    def __init__(self, setup: DockSetup, name: str, folder: Path, token: str, host: str, ledger: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        unique = f"{dock_name(token)}{name}"
        place, memory_bytes, is_shared = choose_place(unique, folder, setup.memory_bytes, setup.segment_bytes)
        if not is_shared:
            log.warning("/dev/shm cannot hold %d bytes: the arena is a folder on disk, %s", memory_bytes, place)
        self.node = name
        self._is_shared = is_shared
        self.key, place, numbers = _claim_identity(place)
        # memory smaller than a segment is cut into smaller segments: else no writer would ever get one
        segment_bytes = setup.segment_bytes if setup.segment_bytes <= memory_bytes else memory_bytes // 4
        self._arena = Arena(place, folder / spill_name(self.key), memory_bytes, segment_bytes, numbers)
        if is_shared:
            for orphan in remove_orphans(place.parent):
                log.warning("removed %s, which no warehouse has used for long", orphan)
        self._spill_bytes = setup.spill_bytes or memory_bytes
        self._views = Views()
        self._writer = Writer(place, self.key, self._views, self._lend_to_self, self._arena.close)
        self._stream = StreamServer(place, token, host, self._views)
        self._puller = Puller(token)
        self._pulls: dict[int, Pull] = {}
        self._pulled: dict[int, m.Copy] = {}  # chunk -> the copy pulled here
        self._parked: list[ParkedLend] = []
        self._finished: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._is_spilling, self._spill_again = False, 0.0
        self._anonymous = 0  # pulls for chunks that the ledger has not numbered yet
        self._refused = self._pull_requests = 0
        self._epoch = -1
        self._reported = self._swept = self._touched = 0.0
        listener = listen(host)
        self.address = address_of(listener)
        self._wire = WireServer(token, [listener])
        self._wire.watch(self._wake_read)
        self.is_stopping = False
        self._arena.prepare(PREPARED_SEGMENTS)
        self._ledger = Link(token, ledger, self._note_from_ledger)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self.is_stopping:
            events = self._wire.wait(TICK_S)
            now = time.monotonic()
            if any(file == self._wake_read for file, _ in events):
                os.read(self._wake_read, 4096)
            self._finish_jobs()
            for client, seq, body in self._wire.receive(now, events):
                self._hear_client(client, seq, body)
            self._wire.left.clear()
            self._tick(now)
        self.shut()

    def shut(self) -> None:
        """Tell the ledger that the bytes are gone: what no other warehouse has is made or put again at once."""
        self._ledger.tell(m.Lost(self.key))
        self._stream.close()
        self._puller.close()
        self._ledger.close()
        self._wire.close()
        self._views.close()
        self._arena.destroy()

    def _tick(self, now: float) -> None:
        if now - self._reported > REPORT_S:
            self._reported = now
            self._ledger.tell(m.StateReport(self.key, self.figures()))
        if now - self._touched > TOUCH_S:
            self._touched = now
            self._arena.touch()
        if now - self._swept > TICK_S:
            self._swept = now
            self._wire.sweep(now)
            self._arena.close_orphans(now)
            self._ask_retire()
            self._spill_if_needed()
        self._serve_parked(now)

    def _hear_client(self, client: bytes, seq: bytes, body: bytes) -> None:
        try:
            answer = self._step(client, seq, m.decode_for_warehouse(body))
        except DockError as error:
            answer = m.Refused("error", error.message, error.remedy)
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError) as error:
            self._refused += 1
            answer = m.Refused("error", f"the warehouse cannot read this message: {error}", "use matching versions")
        if answer is not None:
            self._wire.send(client, seq, m.encode(answer))

    def _step(self, client: bytes, seq: bytes, message: m.ToWarehouse) -> m.Message | None:
        match message:
            case m.Lend(nbytes):
                if nbytes < 0:
                    raise DockError(f"a segment of {nbytes} bytes cannot be lent")
                self._arena.check_fits(nbytes)
                segment = self._arena.lend(nbytes)
                if segment is None:
                    self._parked.append(ParkedLend(client, seq, nbytes, time.monotonic() + LEND_WAIT_S))
                    return None
                return m.Lent(segment.number, segment.generation, segment.nbytes)
            case m.Close(segment, generation):
                self._arena.close(segment, generation)
                self._ask_retire()
                return None
            case m.Fetch(chunk, sources):
                return self._fetch(client, seq, chunk, sources)
            case m.AskFigures():
                return m.Figures(self.figures())

    def figures(self) -> dict[str, int]:
        return {
            "memory_bytes": self._arena.memory_bytes,
            "used_bytes": self._arena.used_bytes,
            "busy_bytes": self._arena.busy_bytes,
            "spilled_bytes": self._arena.spilled_bytes,
            "failed_spills": self._arena.failed_spills,
            "segments": len(self._arena.segments),
            "recycled": self._arena.recycled,
            "pulled_bytes": self._puller.pulled_bytes,
            "pull_requests": self._pull_requests,
            "sent_bytes": self._stream.sent_bytes,
            "writers_waiting": len(self._parked),
            "refused": self._refused + self._wire.refused + self._stream.refused,
            "is_shared_memory": int(self._is_shared),
        }

    # -- memory ------------------------------------------------------------------------------------------------------

    def _serve_parked(self, now: float) -> None:
        for parked in list(self._parked):
            segment = self._arena.lend(parked.nbytes)
            if segment is None and now < parked.deadline:
                continue
            self._parked.remove(parked)
            answer = m.Nothing() if segment is None else m.Lent(segment.number, segment.generation, segment.nbytes)
            self._wire.send(parked.client, parked.seq, m.encode(answer))

    def _spill_if_needed(self) -> None:
        if self._is_spilling or time.monotonic() < self._spill_again:
            return
        if self._arena.busy_bytes <= self._spill_bytes and not self._parked:
            return
        segment = self._arena.spillable()
        if segment is None:
            return
        self._is_spilling = True

        def spill() -> None:
            try:
                self._arena.copy_out(segment)
                self._finished.put(("spilled", segment, None))
            except Exception as error:  # whatever it was: nothing would ever be spilled again
                self._finished.put(("spilled", segment, error))
            self._wake()

        threading.Thread(target=spill, daemon=True, name="spill").start()

    def _lend_to_self(self, nbytes: int) -> m.Lent:
        segment = self._arena.lend(nbytes)
        if segment is None:
            raise SegmentGone("this warehouse's memory is full")
        return m.Lent(segment.number, segment.generation, segment.nbytes)

    # -- pulling -----------------------------------------------------------------------------------------------------

    def _fetch(self, client: bytes, seq: bytes, chunk: m.ChunkAt, sources: dict[int, str]) -> m.Message | None:
        self._pull_requests += 1
        self._arena.check_fits(chunk.nbytes)
        if chunk.key in self._pulled:
            return m.Fetched(self._pulled[chunk.key])
        try:
            pull = self._start_pull(chunk, sources)
        except SegmentGone:
            return m.Nothing()  # no memory yet: the reader asks again
        pull.askers.append((client, seq))
        return None

    def _start_pull(self, chunk: m.ChunkAt, sources: dict[int, str]) -> Pull:
        key = chunk.key
        if key < 0:  # a replica of a chunk that is not sealed yet: not shared
            self._anonymous -= 1
            key = self._anonymous
        elif key in self._pulls:
            return self._pulls[key]
        pull = self._pulls[key] = Pull(chunk, self._writer.reserve(chunk.nbytes))
        target = pull.reservation.target.data

        def job() -> None:
            try:
                self._puller.pull(chunk, sources, target)
                self._finished.put(("pulled", key, None))
            except Exception as error:
                self._finished.put(("pulled", key, error))
            self._wake()

        self._puller.submit(job)
        return pull

    def _finish_jobs(self) -> None:
        while not self._finished.empty():
            match self._finished.get():
                case ("pulled", key, error):
                    self._finish_pull(key, error)
                case ("spilled", segment, None):
                    self._arena.finish_spill(segment)
                    self._is_spilling = False
                case ("spilled", segment, error):
                    log.warning("a segment could not be written to disk, and stays in memory: %s", error)
                    self._arena.give_up_spill(segment)
                    self._is_spilling, self._spill_again = False, time.monotonic() + SPILL_AGAIN_S
                case ("heard", message):
                    self._hear_ledger(message)

    def _finish_pull(self, key: int, error: Exception | None) -> None:
        pull = self._pulls.pop(key)
        copy = pull.reservation.copy
        answer: m.Message = m.Fetched(copy)
        if error is not None:
            log.warning("a pull failed: %s", error)
            answer = m.Refused("gone", f"the chunk could not be pulled: {error}", "take the rows again")
        elif key >= 0:
            self._pulled[key] = copy
            self._ledger.tell(m.HeldPieces(key, copy))
        self._writer.settle(pull.reservation)
        for client, seq in pull.askers:
            self._wire.send(client, seq, m.encode(answer))

    # -- the ledger --------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        segments = {s.number: s.generation for s in self._arena.segments.values()}
        place = str(self._arena.folder)
        hello = m.Announce(
            self.key, self.node, place, self.address, self._stream.address, segments, self._arena.next_number
        )
        self._ledger.tell(hello)

    def _ask_retire(self) -> None:
        segments = self._arena.retirable()
        if segments:
            self._ledger.tell(m.Retire(self.key, segments))

    def _note_from_ledger(self, message: Any) -> None:
        self._finished.put(("heard", message))
        self._wake()

    def _hear_ledger(self, message: Any) -> None:
        match message:
            case None:
                self._announce()  # the connection is new
            case m.Epoch(epoch):
                if epoch != self._epoch:
                    if epoch >= 0:
                        self._epoch = epoch
                    self._arena.doubt_all()
                    self._announce()
            case m.Empty(segment, generation):
                self._arena.note_empty(segment, generation)
                self._ask_retire()
            case m.Retired(segments):
                self._recycle(segments)
            case m.Hold(chunk, sources):
                if chunk.key in self._pulled:  # the ledger restarted before it was told
                    self._ledger.tell(m.HeldPieces(chunk.key, self._pulled[chunk.key]))
                else:
                    with suppress(DockError):  # memory is full; the ledger orders again
                        self._start_pull(chunk, sources)
            case m.Refused(_, message, remedy):
                log.error("the ledger refused this warehouse: %s (%s)", message, remedy)
                if "given up as lost" in message:
                    self.is_stopping = True
            case _:
                pass

    def _recycle(self, numbers: tuple[int, ...]) -> None:
        retired = {n for n in numbers if n in self._arena.segments and self._arena.recycle(n)}
        for number in numbers:
            segment = self._arena.segments.get(number)
            if segment is not None and number not in retired:
                segment.maybe_empty = segment.state == "closed"  # still in use by a reader: tried again soon
        if retired:
            self._pulled = {key: copy for key, copy in self._pulled.items() if copy.segment not in retired}
            self._serve_parked(time.monotonic())

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it will wake already
            os.write(self._wake_write, b"x")


def _identity(place: Path) -> tuple[int, Path]:
    """Return the warehouse's key and its arena, whose name ends in the key: the same bytes are the same warehouse,
    and a reader of one arena cannot mistake another for it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    own = re.compile(re.escape(place.name) + "-([0-9a-f]{14})")  # and not of a node whose name has it as a prefix
    for left in sorted(place.parent.iterdir()):
        found = own.fullmatch(left.name)
        if found and is_own_folder(left):  # another user could create one of this name
            return int(found[1], 16), left
    key = int.from_bytes(os.urandom(7), "little")
    arena = place.with_name(f"{place.name}-{key:014x}")
    arena.mkdir(mode=0o700)
    return key, arena


def _claim_identity(place: Path) -> tuple[int, Path, int]:
    """Like `_identity`, and claim the arena; a new one when the process that still worked in it ended and removed
    it."""
    while True:
        key, arena = _identity(place)
        numbers = claim(arena)
        if numbers is not None:
            return key, arena, numbers
