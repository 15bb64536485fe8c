"""A process's client of its node's warehouse: room to write, bytes to read, wherever they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tidemill.dock.net import messages as m
from tidemill.dock.net.caller import Caller
from tidemill.dock.store.segment import Bytes, SegmentGone, Views
from tidemill.dock.store.writer import Reservation, Writer
from tidemill.errors import DockError

PATIENCE_S = 30.0  # a node without a warehouse for this long is reported
CALL_S = 5.0
COPY_PATIENCE_S = 150.0  # longer than a silent warehouse stays listed
RETRY_S = 0.02

_path = lru_cache(maxsize=64)(Path)  # one object per arena, because every read uses it as a key


class Node:
    def __init__(self, token: str, name: str | None, directory: Callable[[], tuple[m.Announce, ...]]) -> None:
        self._token, self._name, self._directory = token, name, directory
        self._views = Views()
        self._lock = threading.RLock()
        self._callers: dict[tuple[threading.Thread, str], Caller] = {}  # to each warehouse, from each thread
        self._warehouses: dict[int, m.Announce] = {}
        self._home: m.Announce | None = None
        self._writer: Writer | None = None
        self._is_left = False
        self.refresh()

    # -- writing -----------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> Reservation:
        return self._insist(lambda: self._own_writer().reserve(nbytes))  # type: ignore[no-any-return]

    def settle(self, reservation: Reservation) -> None:
        reservation.writer.settle(reservation)

    def copies(self, reservation: Reservation, nbytes: int, replicas: int) -> tuple[m.Copy, ...]:
        """Return where the chunk is, once the wanted number of other warehouses has pulled it."""
        copies = [reservation.copy]
        deadline = time.monotonic() + COPY_PATIENCE_S
        while len(copies) <= replicas:
            others = self._others(copies)
            if len(others) < replicas + 1 - len(copies):
                self.refresh()  # one may have come back
                others = self._others(copies)
            if not others or time.monotonic() > deadline:
                break  # fewer copies than wanted; the ledger requests more when it can
            answer = self._try(others[0].control, m.Fetch(m.ChunkAt(-1, nbytes, (copies[0],)), self._streams()))
            if isinstance(answer, m.Fetched):
                copies.append(answer.copy)
            else:
                time.sleep(RETRY_S)
                self.refresh()
                if reservation.copy.warehouse not in self._warehouses:
                    raise SegmentGone("the warehouse written to is gone", "write it again")
        return tuple(copies)

    def _others(self, copies: list[m.Copy]) -> list[m.Announce]:
        """Order warehouses without a copy, the next in the ring first, which spreads the load."""
        holders = {copy.warehouse for copy in copies}
        others = [w for w in self._warehouses.values() if w.warehouse not in holders]
        return sorted(others, key=lambda w: (w.warehouse - copies[0].warehouse) % (1 << 56))

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, chunk: m.ChunkAt) -> Bytes:
        """Map a chunk's bytes. If no copy is on this node, its warehouse pulls one first."""
        home = self._home
        for copy in chunk.copies:
            if home is not None and copy.warehouse == home.warehouse:
                return self._map(home, copy, chunk.nbytes)
        return self._insist(lambda: self._pull(chunk))  # type: ignore[no-any-return]

    def _pull(self, chunk: m.ChunkAt) -> Bytes:
        if any(copy.warehouse not in self._warehouses for copy in chunk.copies):
            self.refresh()
        home = self._need_home()
        while True:
            answer = self._call(home.control, m.Fetch(chunk, self._streams()))
            if isinstance(answer, m.Fetched):
                return self._map(home, answer.copy, chunk.nbytes)
            if isinstance(answer, m.Refused):
                raise SegmentGone(answer.message, answer.remedy)
            time.sleep(RETRY_S)  # memory is full on this node: room comes as others commit

    def _map(self, home: m.Announce, copy: m.Copy, nbytes: int) -> Bytes:
        return self._views.read(_path(home.arena), copy.segment, copy.generation, copy.offset, nbytes)

    # -- the warehouse -----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Ask the ledger again where the warehouses are."""
        abandoned: Writer | None = None
        with self._lock:
            self._warehouses = {w.warehouse: w for w in self._directory()}
            home = self._choose_home()
            if home != self._home:
                before, self._home = self._home, home
                if before is not None and (home is None or before.warehouse != home.warehouse):
                    abandoned, self._writer = self._writer, None
                    self._views.forget(_path(before.arena))
        if abandoned is not None:  # outside our lock: it has its own, and calls us under it
            abandoned.close()

    def leave(self) -> None:
        """Stop all waiting for a warehouse, or for room in one. From any thread."""
        self._is_left = True
        for caller in list(self._callers.values()):
            caller.close()

    def close(self) -> None:
        self._is_left = True
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        with self._lock:
            self._views.close()
            for caller in list(self._callers.values()):
                caller.close()
            self._callers.clear()

    def _choose_home(self) -> m.Announce | None:
        here = [w for w in self._warehouses.values() if Path(w.arena).is_dir()]
        if self._name is not None:
            here = [w for w in here if w.node == self._name]
        return min(here, key=lambda w: w.node) if here else None

    def _need_home(self) -> m.Announce:
        home = self._home
        if home is None:
            raise ConnectionError("no warehouse on this node")
        return home

    def _own_writer(self) -> Writer:
        with self._lock:
            home = self._need_home()
            if self._writer is None:
                key = home.warehouse
                calls = partial(self._lend, key), partial(self._tell_closed, key)
                self._writer = Writer(_path(home.arena), key, self._views, *calls)
            return self._writer

    def _lend(self, warehouse: int, nbytes: int) -> m.Lent:
        while True:
            home = self._need_home()  # it may have restarted at another address
            if home.warehouse != warehouse:
                raise ConnectionError("this node has another warehouse now")
            answer = self._call(home.control, m.Lend(nbytes))
            if isinstance(answer, m.Lent):
                return answer
            if isinstance(answer, m.Refused):
                raise DockError(answer.message, answer.remedy)
            # else the warehouse is full: the repeated request is what waits

    def _tell_closed(self, warehouse: int, segment: int, generation: int) -> None:
        home = self._home
        if home is not None and home.warehouse == warehouse:  # else it is gone, with the segment
            self._caller(home.control).tell(m.Close(segment, generation))

    def _streams(self) -> dict[int, str]:
        return {key: w.data for key, w in self._warehouses.items()}

    def _insist(self, action: Callable[[], Any]) -> Any:
        """Try again while the node's warehouse is restarting."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return action()
            except (ConnectionError, TimeoutError, FileNotFoundError) as error:
                if self._is_left or time.monotonic() > deadline:
                    where = f"node {self._name!r}" if self._name else "this machine"
                    raise DockError(f"no warehouse answers on {where}: {error}", "start one for it") from None
                time.sleep(RETRY_S)
                self.refresh()

    def _try(self, control: str, message: m.Message) -> Any:
        try:
            return self._call(control, message)
        except (ConnectionError, TimeoutError):
            return None

    def _call(self, control: str, message: m.Message) -> Any:
        if self._is_left:
            raise DockError("this dock was left", "connect again")
        try:
            return self._caller(control).ask(message, within_s=CALL_S)
        except (ConnectionError, TimeoutError):
            caller = self._callers.pop((threading.current_thread(), control), None)
            if caller is not None:  # unless `close` has closed it
                caller.close()
            raise

    def _caller(self, control: str) -> Caller:
        mine = threading.current_thread(), control
        caller = self._callers.get(mine)
        if caller is None:
            with self._lock:
                for key in [key for key in list(self._callers) if not key[0].is_alive()]:
                    self._callers.pop(key).close()
                caller = self._callers[mine] = Caller(self._token, control, patience_s=0.0)
        return caller
