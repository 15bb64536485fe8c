"""The store in which ranks meet: torch's own interface over the dock's wire. Only holders of its key can use it.

torch's TCPStore listens on every interface and asks for no secret. This one listens on one address, by which the other
ranks reach this machine (the loopback address where they are all here). Both sides prove that they have the store's
random key before a message is read. The key travels with the address, through the driver's own channels.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import torch.distributed as dist

from tidemill.cluster.report import StoreAddress
from tidemill.dock.net.caller import Caller
from tidemill.dock.net.messages import Message, encode
from tidemill.dock.net.wire import address_of, listen
from tidemill.dock.net.wire_server import WireServer
from tidemill.errors import CollectiveError

KEY_BYTES = 32
GONE_S = 30.0  # a store that cannot be reached for this long is given up: a busy machine takes seconds to connect
SWEEP_S = 1.0  # between sweeps of connections that have not proved in time that they have the key
IDLE_S = 86400.0  # `poll` waits for a key in the background, however long its owner has nothing to say
_dist: Any = dist  # its types do not say what stores it has


class Set(Message):
    key: str
    value: bytes


class Get(Message):
    """Answered once the key is there."""

    key: str


class Wait(Message):
    """Answered once all keys are there."""

    keys: list[str]


class Check(Message):
    keys: list[str]


class Add(Message):
    key: str
    amount: int


class CompareSet(Message):
    key: str
    expected: bytes
    desired: bytes


class Delete(Message):
    key: str


class Count(Message):
    pass


Ask = Set | Get | Wait | Check | Add | CompareSet | Delete | Count
Answer = bytes | int | bool
_decode = msgspec.msgpack.Decoder(Ask).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode
_here: WeakValueDictionary[str, StoreServer] = WeakValueDictionary()  # stores of this process, by address


class StoreServer:
    """Keeps a store in this process. Processes that hold its address use it through a `KeyedStore`."""

    def __init__(self, host: str) -> None:
        """`host`: the address by which the other ranks reach this machine."""
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._parked: dict[bytes, tuple[bytes, Ask]] = {}  # client → number of its request, and what it waits for
        self._answered: dict[bytes, tuple[bytes, bytes]] = {}  # a request that is sent again is not carried out again
        self._is_closed = False
        listener = listen(host)
        self.address = StoreAddress(address_of(listener), secrets.token_hex(KEY_BYTES))
        self._wire = WireServer(self.address.key, [listener])
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wire.watch(self._woken)
        _here[self.address.address] = self
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def ask(self, ask: Ask, within_s: float) -> Answer:
        """From a thread of this process."""
        with self._changed:
            found = self._carry_out(ask)
            deadline = time.monotonic() + within_s
            while found is None:
                if self._is_closed or not self._changed.wait(deadline - time.monotonic()):
                    raise _late(ask, within_s)
                found = self._carry_out(ask)
        return found

    def now(self, ask: Ask) -> Answer | None:
        """Like `ask`; None where that would wait."""
        with self._changed:
            return self._carry_out(ask)

    def close(self) -> None:
        """Requests that wait for a key fail."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            self._rouse()
        self._thread.join()

    def _carry_out(self, ask: Ask) -> Answer | None:
        """None: a key is still missing. The caller holds the lock."""
        values = self._values
        match ask:
            case Get(key):
                return values.get(key)
            case Wait(keys):
                return all(key in values for key in keys) or None
            case Check(keys):
                return all(key in values for key in keys)
            case Count():
                return len(values)
            case Delete(key):
                return values.pop(key, None) is not None
        answer = self._write(ask)
        self._changed.notify_all()
        if self._parked and threading.current_thread() is not self._thread:
            self._rouse()
        return answer

    def _write(self, ask: Ask) -> Answer:
        values = self._values
        match ask:
            case Set(key, value):
                values[key] = value
                return True
            case Add(key, amount):
                number = int(values.get(key, b"0")) + amount
                values[key] = str(number).encode()  # the form in which torch's own stores keep it
                return number
            case CompareSet(key, expected, desired):
                if values.get(key, b"") == expected and (key in values or not expected):
                    values[key] = desired
                return values.get(key, expected)
        raise AssertionError(ask)

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread will wake anyway
            os.write(self._wake, b"\0")

    # Its thread

    def _run(self) -> None:
        while not self._is_closed:
            events = self._wire.wait(SWEEP_S)
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, select.PIPE_BUF)
            now = time.monotonic()
            letters = self._wire.receive(now, events)
            self._wire.sweep(now)
            with self._changed:
                for client, _ in self._wire.left:
                    self._parked.pop(client, None)  # it asks again when it is back
                self._wire.left.clear()
                for letter in letters:
                    self._receive(*letter)
                self._serve_parked()
        self._wire.close()
        os.close(self._woken)
        os.close(self._wake)

    def _receive(self, client: bytes, number: bytes, body: bytes) -> None:
        before = self._answered.get(client)
        if before is not None and before[0] == number:
            self._wire.send(client, *before)
            return
        with contextlib.suppress(msgspec.DecodeError):  # a malformed message gets no answer
            self._parked[client] = number, _decode(body)

    def _serve_parked(self) -> None:
        """Until nothing more can be answered: an answer to one request may be what another waits for."""
        moved = True
        while moved:
            moved = False
            for client, (number, ask) in list(self._parked.items()):
                found = self._carry_out(ask)
                if found is not None:
                    del self._parked[client]
                    self._answered[client] = number, encode(found)
                    self._wire.send(client, *self._answered[client])
                    moved = True


class KeyedStore(_dist.Store):  # type: ignore[misc]
    """torch's view of the store that the process at `where` keeps. For any thread."""

    def __init__(self, where: StoreAddress, timeout: timedelta) -> None:
        super().__init__()
        self.where, self._wait = where, timeout
        self._server = _here.get(where.address)
        self._idle: deque[Caller] = deque()
        self._awaited: tuple[str, Future[bytes]] | None = None

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(Set(key, value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        found = self._ask(Get(key))
        assert isinstance(found, bytes)
        return found

    def poll(self, key: str) -> bytes | None:
        """The value, if it is there. For one thread, which may ask for one key again and again at no cost: a thread
        waits for the key in the background."""
        if self._server is not None:
            found = self._server.now(Get(key))
            assert found is None or isinstance(found, bytes)
            return found
        if self._awaited is None or self._awaited[0] != key:
            self._awaited = key, Future()
            threading.Thread(target=self._await, args=self._awaited, daemon=True).start()
        future = self._awaited[1]
        if not future.done():
            return None
        self._awaited = None
        return future.result()

    def _await(self, key: str, future: Future[bytes]) -> None:
        try:
            found = self._ask(Get(key), timedelta(seconds=IDLE_S))
            assert isinstance(found, bytes)
            future.set_result(found)
        except CollectiveError as error:
            future.set_exception(error)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(Add(key, amount)))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        given = (x.encode() if isinstance(x, str) else bytes(x) for x in (expected, desired))
        found = self._ask(CompareSet(key, *given))
        assert isinstance(found, bytes)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(Check(list(keys))))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(Wait(list(keys)), timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Delete(key)))

    def num_keys(self) -> int:
        return int(self._ask(Count()))

    def clone(self) -> KeyedStore:
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # the names that torch's C++ side looks for

    def _ask(self, ask: Ask, timeout: timedelta | None = None) -> Answer:
        within_s = (timeout or self._wait).total_seconds()
        if self._server is not None:
            return self._server.ask(ask, within_s)
        try:
            caller = self._idle.pop()
        except IndexError:
            caller = Caller(self.where.key, self.where.address, decode=_decode_answer, patience_s=GONE_S)
        try:
            answer: Answer = caller.ask(ask, within_s)
        except TimeoutError:
            raise _late(ask, within_s) from None
        except OSError:
            raise CollectiveError("the process that keeps the ranks' store is gone", "see its log") from None
        finally:
            self._idle.append(caller)
        return answer


def _late(ask: Ask, within_s: float) -> CollectiveError:
    what = getattr(ask, "key", None) or ", ".join(getattr(ask, "keys", ()))
    return CollectiveError(f"{what!r} was not in the ranks' store within {within_s:g} s: another rank is late or gone")
