"""The ledger's process: one loop that receives, steps the ledger, journals, and only then answers. Blocked takes and
puts are parked here, and served by the step that makes rows or room for them; they delay nobody. A request that arrives
twice (its answer was lost) gets the first answer again."""

from __future__ import annotations

import logging
import socket
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.dock.keyed import state
from tidemill.dock.keyed.steps import KeyedSteps
from tidemill.dock.keyed.table import KEYED
from tidemill.dock.ledger import requeue as again
from tidemill.dock.ledger import snapshot
from tidemill.dock.ledger.counts import Counts
from tidemill.dock.ledger.records import Grant, Written
from tidemill.dock.ledger.waiters import ProgressWaiter, Waiter, Waiters
from tidemill.dock.local import with_waiting
from tidemill.dock.net import keyed_messages
from tidemill.dock.net import messages as m
from tidemill.dock.net.answers import granted, ints, of_rows, progress_reply, refusal
from tidemill.dock.net.journal import Journal, next_epoch
from tidemill.dock.net.wire import OWNER_BYTES, SEQ
from tidemill.dock.net.wire_server import WireServer
from tidemill.dock.setup import DockSetup
from tidemill.dock.store.catalog import Catalog
from tidemill.errors import DockError

log = logging.getLogger("tidemill.dock")

TICK_S = 0.05  # how late an expiry may be noticed
# A journal of this many records, and of more than an eighth of the rows, is replaced by a snapshot: a restart reads
# about 8,000 records a second and has two seconds for everything; a snapshot costs about a microsecond per row.
SNAPSHOT_RECORDS, ROWS_PER_RECORD = 2000, 8
REMEMBERED_CLIENTS = 1 << 14
PAUSE_S = 1.0
# errors that a malformed message may cause
NONSENSE = (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, OverflowError)
CATALOG = "catalog"
KEYED_MESSAGES = get_args(keyed_messages.FromClient)


@dataclass(slots=True)
class ParkedPut:
    client: bytes
    seq: bytes
    message: m.Put
    asked: float
    deadline: float
    since: float  # the longest waiting is served first


class LedgerServer:
    def __init__(self, setup: DockSetup, folder: Path, token: str, listeners: Sequence[socket.socket]) -> None:
        self._setup = setup
        self._journal = Journal(folder)
        self.epoch = next_epoch(folder)
        self._ledger = setup.ledger(self.epoch)
        self._catalog = Catalog(setup.replicas)
        self._keyed = KeyedSteps(setup.keyed.table(self._ledger.chunks, folder.parent), self._catalog)
        self._recover()
        self._waiters = Waiters(self._ledger)
        self._parked_puts: list[ParkedPut] = []
        self._last: dict[bytes, tuple[bytes, bytes | None]] = {}  # client -> its last request and the answer to it
        self._outbox: list[tuple[bytes, bytes, bytes]] = []
        self._warehouse_clients: dict[int, bytes] = {}
        self._put_wait_s = 0.0
        self._refused = 0
        self._started = self._ticked = time.monotonic()
        self._awaited = self._catalog.holders()  # known from before a restart, without a sign of life since
        self._wire = WireServer(token, listeners)
        self.is_stopping = False

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        ticked = 0.0
        while not self.is_stopping:
            events = self._wire.wait(TICK_S)
            now = time.monotonic()
            letters = self._wire.receive(now, events)
            self._note_who_left()  # first: a client that came back repeats its request in these letters
            for client, seq, body in letters:
                self._handle(client, seq, body, now)
            if now - ticked >= TICK_S:
                ticked = now
                self._tick(now)
            self._settle(now)
            self._flush()
        self._journal.rotate(self._snapshot())
        self._journal.close()
        self._wire.close()

    def _note_who_left(self) -> None:
        """Give back a process's leases at once when its last local connection ends, because the process has ended."""
        for client, is_local in self._wire.left:
            owner = client[:OWNER_BYTES]
            has_ended = is_local and not self._wire.has_owner(owner)
            self._forget(client, has_ended)
            if has_ended:
                self._ledger.release(owner)
                self._keyed.table.release(owner)
        self._wire.left.clear()

    def _forget(self, client: bytes, has_ended: bool) -> None:
        """Forget what a disconnected client waits for. If it comes back, it asks again, and gets the same answer
        unless its lease was taken back."""
        last = self._last.get(client)
        if last is None or not (has_ended or last[1] is None):
            return
        del self._last[client]
        if last[1] is None:
            self._waiters.forget(client)
            self._keyed.forget(client)
            self._parked_puts = [put for put in self._parked_puts if put.client != client]

    def _handle(self, client: bytes, seq: bytes, body: bytes, now: float) -> None:
        last = self._last.get(client)
        if last is not None and last[0] == seq:
            if last[1] is not None:
                self._outbox.append((client, seq, last[1]))
            return  # else it is parked, and answered later
        self._last[client] = (seq, None)
        if len(self._last) > REMEMBERED_CLIENTS:
            del self._last[next(iter(self._last))]
        try:
            message = m.decode_for_ledger(body)
            answer = self._step(client, seq, message, now)
        except DockError as error:
            answer = refusal(error)
        except NONSENSE as error:
            # the peer has the token but sent a malformed message: answer, count it, and continue serving the others
            self._refused += 1
            answer = refusal(error)
        if answer is not None:
            self._answer(client, seq, answer)

    def _answer(self, client: bytes, seq: bytes, answer: m.Message) -> None:
        body = m.encode(answer)
        if self._last.get(client, (b"",))[0] == seq:
            self._last[client] = (seq, body)
        self._outbox.append((client, seq, body))

    def _settle(self, now: float) -> None:
        """Serve what the steps of this round made possible."""
        self._waiters.serve(now)
        self._keyed.serve(self._answer_or_refuse, now)
        while self._admit_parked(now):
            self._waiters.serve(now)
        freed, self._ledger.chunks.freed = self._ledger.chunks.freed, []
        self._ledger.gone.difference_update(freed)
        for warehouse, notice in self._catalog.free(key for key in freed if key >= 0):
            self._tell(warehouse, notice)

    def _flush(self) -> None:
        """Write the journal, then the answers: what was answered is never lost."""
        table = self._keyed.table
        effects = (self._catalog.effects or []) + (self._ledger.effects or []) + (table.effects or [])
        if effects:
            self._journal.append(effects)
            self._catalog.effects, self._ledger.effects, table.effects = [], [], []
        for client, seq, body in self._outbox:
            self._wire.send(client, seq, body)
        self._outbox.clear()
        if self._journal.records > max(SNAPSHOT_RECORDS, len(self._ledger.slot_of) // ROWS_PER_RECORD):
            self._journal.rotate(self._snapshot())

    def _tick(self, now: float) -> None:
        self._wire.sweep(now)
        self._note_who_left()
        self._ledger.expire(now)
        self._waiters.expire(now)
        self._keyed.expire(self._answer_or_refuse, now)
        while self._parked_puts and any(p.deadline <= now for p in self._parked_puts):
            put = next(p for p in self._parked_puts if p.deadline <= now)
            self._parked_puts.remove(put)
            self._put_wait_s += now - put.asked
            self._answer(put.client, put.seq, m.Nothing())
        self._watch_warehouses(now)
        for warehouse, chunk in self._catalog.orders(now):
            self._tell(warehouse, m.Hold(chunk, self._streams()))

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _step(self, client: bytes, seq: bytes, message: m.ToLedger, now: float) -> m.Message | None:
        match message:
            case m.Put():
                return self._put(client, seq, message, now)
            case m.Take():
                return self._take(client, seq, message, now)
            case m.Commit():
                return self._commit(message, now)
            case m.Renew(lease):
                self._ledger.renew(lease, now)
                return m.Done()
            case m.Abandon(lease):
                self._ledger.abandon(lease)
                return m.Done()
            case m.Advance(version):
                self._ledger.advance(version)
                return m.Done()
            case m.AskProgress():
                return self._progress(client, seq, message, now)
            case m.AskFinished(stage, tag):
                return m.Ids(np.array(self._ledger.finished(stage, tag), np.int64).tobytes())
            case m.Retag(groups, tag):
                self._ledger.retag(ints(groups).tolist(), tag)
                return m.Done()
            case m.AskState():
                return m.State(self._state(now))
            case m.AskCounted(heard):
                told = self._ledger.tell(heard)
                return m.CountedReply(told.number, told.sums, told.means)
            case m.AskSetup():
                return self._setup_message()
            case m.Missing():
                missing, self._ledger.missing = self._ledger.missing, []
                return m.Ids(np.array(missing, np.int64).tobytes())
            case _ if isinstance(message, KEYED_MESSAGES):
                return self._keyed.step(client, seq, message, now)
            case _:
                return self._warehouse_step(client, message, now)

    def _answer_or_refuse(self, client: bytes, seq: bytes, answer: m.Message | Exception) -> None:
        self._answer(client, seq, refusal(answer) if isinstance(answer, Exception) else answer)

    def _put(self, client: bytes, seq: bytes, message: m.Put, now: float) -> m.Message | None:
        rows = len(ints(message.ids))
        if len(ints(message.group)) != rows or (message.sizes is not None and len(ints(message.sizes)) != rows):
            raise DockError(f"a put of {rows} ids must come with as many groups and sizes")
        if not self._ledger.chunks.has_room(message.tag, rows, message.outputs.nbytes):
            parked = ParkedPut(client, seq, message, now, now + message.wait_s, now - max(0.0, message.waited_s))
            insort(self._parked_puts, parked, key=lambda put: put.since)
            return None
        return self._admit(message, now)

    def _admit(self, message: m.Put, now: float) -> m.Message:
        ids, group = ints(message.ids), ints(message.group)
        sizes = None if message.sizes is None else ints(message.sizes)
        written = self._written(message.outputs, len(ids))
        try:
            return m.Done(self._ledger.put(ids, group, sizes, written, message.tag, now))
        except (DockError, *NONSENSE):
            self._ledger.chunks.freed.append(written.chunk)
            raise

    def _admit_parked(self, now: float) -> bool:
        """Admit the put that has waited longest, of those that fit now. A put that does not fit delays nobody: a
        consumer of whole groups may wait for the rows behind it."""
        for put in self._parked_puts:
            if self._ledger.chunks.has_room(put.message.tag, len(put.message.ids) // 8, put.message.outputs.nbytes):
                self._parked_puts.remove(put)
                self._put_wait_s += now - put.asked
                try:
                    self._answer(put.client, put.seq, self._admit(put.message, now))
                except (DockError, *NONSENSE) as error:
                    self._answer(put.client, put.seq, refusal(error))
                return True
        return False

    def _take(self, client: bytes, seq: bytes, message: m.Take, now: float) -> m.Message | None:
        want = message.want
        self._ledger.expire(now)
        grant = self._ledger.take(message.stage, want, now, client[:OWNER_BYTES])
        if grant is not None:
            return granted(grant, now, self._catalog)
        if message.wait_s <= 0:
            return m.Nothing()

        def answer(given: Grant | DockError | None) -> None:
            if isinstance(given, DockError):
                self._answer(client, seq, refusal(given))
            else:
                self._answer(
                    client, seq, m.Nothing() if given is None else granted(given, time.monotonic(), self._catalog)
                )

        since = now - max(0.0, message.waited_s)
        owner = client[:OWNER_BYTES]
        self._waiters.park(Waiter(message.stage, want, now + message.wait_s, answer, client, owner, since))
        return None

    def _progress(self, client: bytes, seq: bytes, message: m.AskProgress, now: float) -> m.Message | None:
        self._ledger.expire(now)
        stage, tag, until = message.stage, message.tag, message.until
        if until is None or message.wait_s <= 0 or self._ledger.controller(stage).holds(until, tag):
            return progress_reply(self._ledger.progress(stage, tag))
        self._waiters.watch(
            ProgressWaiter(
                stage,
                tag,
                until,
                now + message.wait_s,
                lambda progress: self._answer(client, seq, progress_reply(progress)),
                client,
            )
        )
        return None

    def _commit(self, message: m.Commit, now: float) -> m.Message:
        if message.lease in self._ledger.committed:
            return m.Done()
        rows = self._ledger.lease_rows(message.lease, now)
        written = self._written(message.outputs, rows, message.counts)
        try:
            self._ledger.commit(message.lease, written, ints(message.drop).tolist(), now)
        except (DockError, *NONSENSE):
            self._ledger.chunks.freed.append(written.chunk)
            raise
        return m.Done()

    def _written(self, outputs: m.Outputs, rows: int, counts: Counts | None = None) -> Written:
        version, length = of_rows(outputs.version, np.int32, rows), of_rows(outputs.length, np.int32, rows)
        score = of_rows(outputs.score, np.float32, rows)
        chunk = -1
        if outputs.copies:
            chunk = self._catalog.add(outputs.nbytes, self._catalog.usable(outputs.copies))
        return Written(outputs.columns, chunk, outputs.nbytes, version, length, score, counts)

    # -- warehouses --------------------------------------------------------------------------------------------------

    def _warehouse_step(self, client: bytes, message: m.ToLedger, now: float) -> m.Message | None:
        match message:
            case m.Announce():
                if message.warehouse in self._catalog.lost_warehouses:
                    raise DockError("this warehouse was given up as lost", "start it with an empty arena")
                self._warehouse_clients[message.warehouse] = client
                self._awaited.discard(message.warehouse)
                self._lose_chunks(self._catalog.announce(message, now))
                return m.Epoch(self.epoch)
            case m.StateReport(warehouse, figures):
                known = self._catalog.warehouses.get(warehouse)
                if known is None or self._warehouse_clients.get(warehouse) != client:
                    return m.Epoch(-1)  # unknown here: it must announce itself
                known.heard, known.figures = now, figures
                return m.Epoch(self.epoch)
            case m.HeldPieces(chunk, copy):
                if not self._catalog.add_copy(chunk, copy):
                    self._tell(copy.warehouse, m.Empty(copy.segment, copy.generation))
                return m.Done()
            case m.Retire(warehouse, segments):
                return m.Retired(self._catalog.retire(warehouse, segments))
            case m.Lost(warehouse):
                self._lose_chunks(self._catalog.lose(warehouse))
                return m.Done()
            case _:
                raise DockError(f"the ledger has no use for {type(message).__name__}")

    def _lose_chunks(self, chunks: list[int]) -> None:
        if chunks:
            log.warning("the bytes of %d chunks are lost; their rows are made or put again", len(chunks))
            again.lose(self._ledger, chunks)
            self._keyed.table.lose(chunks)

    def _watch_warehouses(self, now: float) -> None:
        """Give up a warehouse that has long been silent. Time in which this process itself stood still (a paused
        machine, for example) does not count: messages sent meanwhile lie unread."""
        paused_s, self._ticked = now - self._ticked, now
        if paused_s > PAUSE_S:
            for warehouse in self._catalog.warehouses.values():
                warehouse.heard += paused_s
        if self._awaited and now - self._started > self._setup.warehouse_timeout_s:
            log.warning("%d warehouses have not come back after a restart", len(self._awaited))
            for key in self._awaited:
                self._lose_chunks(self._catalog.lose(key))
            self._awaited.clear()
        for key, warehouse in list(self._catalog.warehouses.items()):
            if now - warehouse.heard > self._setup.warehouse_timeout_s:
                log.warning("warehouse %x on %s has been silent for too long", key, warehouse.hello.node)
                self._lose_chunks(self._catalog.lose(key))

    def _tell(self, warehouse: int, notice: m.Message) -> None:
        client = self._warehouse_clients.get(warehouse)
        if client is not None:
            self._outbox.append((client, SEQ.pack(0), m.encode(notice)))

    def _streams(self) -> dict[int, str]:
        return {key: w.hello.data for key, w in self._catalog.warehouses.items()}

    # -- state -------------------------------------------------------------------------------------------------------

    def _state(self, now: float) -> dict[str, Any]:
        state = with_waiting(self._ledger.state(now), self._waiters, len(self._parked_puts), self._put_wait_s)
        record = asdict(state)
        record["refused"] = self._refused + self._wire.refused
        record["warehouses"] = {w.hello.node: w.figures for w in self._catalog.warehouses.values()}
        record["keyed"] = self._keyed.table.figures()
        record["short_of_copies"] = self._catalog.short_of_copies()
        record["epoch"] = self.epoch
        record["oldest_lease"], record["last_lease"] = self._ledger.leases.span()
        return record

    def _setup_message(self) -> m.Setup:
        return m.Setup(
            epoch=self.epoch,
            stages=tuple((s.name, s.role, s.reads, s.writes, s.scope, s.keeps) for s in self._setup.stages),
            source=self._setup.source,
            watch=self._setup.watch,
            replicas=self._setup.replicas,
            lease_s=self._setup.lease_s,
            keyed_lease_s=self._setup.keyed.lease_s,
            warehouses=tuple(w.hello for w in self._catalog.warehouses.values()),
        )

    def _snapshot(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        record, arrays = snapshot.dump(self._ledger)
        record[CATALOG] = self._catalog.dump()
        arrays[KEYED] = np.frombuffer(state.dump(self._keyed.table), np.uint8)
        return record, arrays

    def _recover(self) -> None:
        saved, effects = self._journal.recover()
        limit, self._ledger.max_staleness = self._ledger.max_staleness, None
        if saved is not None:
            snapshot.load(self._ledger, *saved)
            self._catalog.load(saved[0][CATALOG])
            held = {int(key): (int(key), nbytes) for key, (_, nbytes, _) in saved[0]["chunks"].items()}
            state.load(self._keyed.table, saved[1][KEYED].tobytes(), held)
        for effect in effects:
            if effect[0] == KEYED:
                self._keyed.table.redo(effect)
            elif effect[0] in ("chunk", "copy", "lost"):
                self._catalog.redo(effect)
            else:
                again.redo(self._ledger, effect)
        self._ledger.chunks.freed.clear()
        self._catalog.keep_only(self._ledger.chunks)
        self._ledger.max_staleness = limit
        self._ledger.effects, self._catalog.effects, self._keyed.table.effects = [], [], []
        self._keyed.table.keep_all(time.monotonic())
        self._journal.open()
