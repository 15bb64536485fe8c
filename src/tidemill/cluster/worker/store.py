"""The store in which ranks meet: as torch's own, but only holders of its key can use it.

torch's TCPStore listens on every interface and asks nobody for a secret. This one speaks over CURVE sockets whose keys
come from a random key: a peer without it does not get past the handshake, and what passes is encrypted, authenticated
and cannot be replayed. On one machine it is a Unix socket with a random name and opens no port; between machines it
is bound to the one address that the others reach it by. The key travels with the address, by the driver's own channels.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import secrets
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import torch.distributed as dist
import zmq
from zmq.utils.monitor import recv_monitor_message

from tidemill.cluster.report import StoreAddress
from tidemill.cluster.worker.curve import Doorkeeper, bound_address, calling_socket, listening_socket
from tidemill.dock.net.caller import RESEND_S
from tidemill.dock.net.wire import SEQ, check_host
from tidemill.errors import CollectiveError

KEY_BYTES = 32
NAME_BYTES = 16
GONE_S = 30.0  # a store that cannot be reached for so long is given up: a busy machine takes seconds to connect
_dist: Any = dist  # its types do not say what stores it has


class Ask(msgspec.Struct, array_like=True, tag=True):
    """One request to a store; on the wire its name, then its fields."""


class Set(Ask):
    key: str
    value: bytes


class Get(Ask):
    """Answered once the key is there."""

    key: str


class Wait(Ask):
    """Answered once all keys are there."""

    keys: list[str]


class Check(Ask):
    keys: list[str]


class Add(Ask):
    key: str
    amount: int


class CompareSet(Ask):
    key: str
    expected: bytes
    desired: bytes


class Delete(Ask):
    key: str


class Count(Ask):
    pass


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Set | Get | Wait | Check | Add | CompareSet | Delete | Count).decode
_decode_answer = msgspec.msgpack.Decoder(bytes | int | bool).decode
Answer = bytes | int | bool
_here: WeakValueDictionary[str, StoreServer] = WeakValueDictionary()  # stores of this process, by address


class StoreServer:
    """Keeps a store in this process. Processes that hold its address use it through a `KeyedStore`."""

    def __init__(self, host: str) -> None:
        """`host`: the address that the others reach this machine by; a loopback one says that they are all here."""
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._parked: dict[bytes, tuple[bytes, Ask]] = {}  # client → the number of its request, and what it waits for
        self._answered: dict[bytes, tuple[bytes, bytes]] = {}  # a request sent again is not carried out again
        self._is_closed = False
        self._context: zmq.Context[Any] = zmq.Context()
        key = secrets.token_hex(KEY_BYTES)
        self._doorkeeper = Doorkeeper(self._context, key)
        self._socket = listening_socket(self._context, key)
        self._socket.bind(_endpoint(host))
        self.address = StoreAddress(bound_address(self._socket), key)
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
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
        """As `ask`; None where that would wait."""
        with self._changed:
            return self._carry_out(ask)

    def close(self) -> None:
        """Whoever waits for something here is told, or finds nobody."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            self._rouse()
        self._thread.join()

    def _carry_out(self, ask: Ask) -> Answer | None:
        """None: not before something is there. The caller has the lock."""
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
                values[key] = str(number).encode()  # as torch's own stores keep it
                return number
            case CompareSet(key, expected, desired):
                if values.get(key, b"") == expected and (key in values or not expected):
                    values[key] = desired
                return values.get(key, expected)
        raise AssertionError(ask)

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been told already
            os.write(self._wake, b"\0")

    # Its thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._doorkeeper.socket, self._socket, self._woken):
            poller.register(source, zmq.POLLIN)
        while not self._is_closed:
            ready = dict(poller.poll())
            if self._woken in ready:
                os.read(self._woken, select.PIPE_BUF)
            self._doorkeeper.answer_all()
            with self._changed:
                if self._socket in ready:
                    self._receive()
                self._serve_parked()
        self._socket.close(0)
        self._doorkeeper.socket.close(0)
        self._context.term()
        os.close(self._woken)
        os.close(self._wake)

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                client, *rest = self._socket.recv_multipart(zmq.NOBLOCK)
                with contextlib.suppress(ValueError, msgspec.DecodeError, OverflowError):  # nonsense gets no answer
                    number, body = rest
                    before = self._answered.get(client)
                    if before is not None and before[0] == number:
                        self._socket.send_multipart([client, *before])
                    else:
                        self._parked[client] = number, _decode(body)

    def _serve_parked(self) -> None:
        """Until nothing more can be answered: an answer to one may be what another waits for."""
        moved = True
        while moved:
            moved = False
            for client, (number, ask) in list(self._parked.items()):
                found = self._carry_out(ask)
                if found is not None:
                    del self._parked[client]
                    self._answered[client] = number, _encode(found)
                    self._socket.send_multipart([client, *self._answered[client]])
                    moved = True


class KeyedStore(_dist.Store):  # type: ignore[misc]
    """A store as torch knows it, of which the process at `where` keeps the values. From any thread."""

    def __init__(self, where: StoreAddress, timeout: timedelta) -> None:
        super().__init__()
        self.where, self._wait = where, timeout
        self._server = _here.get(where.address)
        self._idle: deque[_Line] = deque()
        self._awaited: tuple[str, _Line] | None = None

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(Set(key, value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        found = self._ask(Get(key))
        assert isinstance(found, bytes)
        return found

    def poll(self, key: str) -> bytes | None:
        """The value, if it is there. One thread may ask for one key again and again: only the first time costs a
        message, to the store as well."""
        found: Answer | None
        if self._server is not None:
            found = self._server.now(Get(key))
        else:
            if self._awaited is None or self._awaited[0] != key:
                self._awaited = key, self._idle.pop() if self._idle else _Line(self.where)
                self._awaited[1].begin(Get(key))
            found = self._awaited[1].answer(0.0)
            if found is not None:
                self._idle.append(self._awaited[1])
                self._awaited = None
        assert found is None or isinstance(found, bytes)
        return found

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
        line = self._idle.pop() if self._idle else _Line(self.where)
        answer = line.ask(ask, within_s)
        self._idle.append(line)  # one that failed is not used again: an answer may still be under way to it
        return answer


class _Line:
    """A connection to a store, for one request at a time."""

    def __init__(self, where: StoreAddress) -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        self._socket = calling_socket(context, where.key, b"c" + os.urandom(15), where.address)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._lost: float | None = time.monotonic()  # since when nobody who has the key is at the other end
        self._number, self._asked, self._sent = 0, (b"", b""), 0.0

    def ask(self, ask: Ask, within_s: float) -> Answer:
        self.begin(ask)
        deadline = time.monotonic() + within_s
        while (left_s := deadline - time.monotonic()) > 0:
            answer = self.answer(left_s)
            if answer is not None:
                return answer
        self._close()
        raise _late(ask, within_s)

    def begin(self, ask: Ask) -> None:
        self._number += 1
        self._asked = SEQ.pack(self._number), _encode(ask)
        self._send()

    def answer(self, wait_s: float) -> Answer | None:
        """The answer to what was begun; None when it does not come within `wait_s`, or within a moment."""
        until = time.monotonic() + min(wait_s, RESEND_S)
        while self._socket.poll(max(0, math.ceil(1000 * (until - time.monotonic())))):
            number, answer = self._socket.recv_multipart()
            if number == self._asked[0]:
                told: Answer = _decode_answer(answer)
                return told
        if time.monotonic() - self._sent > RESEND_S:
            if self._is_gone():
                self._close()
                raise CollectiveError("the process that keeps the ranks' store is gone", "see its log")
            self._send()  # again: the other side knows it by its number
        return None

    def _send(self) -> None:
        self._socket.send_multipart(self._asked)
        self._sent = time.monotonic()

    def _is_gone(self) -> bool:
        while self._events.poll(0):
            if recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lost = None
            elif self._lost is None:
                self._lost = time.monotonic()
        return self._lost is not None and time.monotonic() - self._lost > GONE_S

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._events.close(0)
        self._socket.close(0)


def _late(ask: Ask, within_s: float) -> CollectiveError:
    what = getattr(ask, "key", None) or ", ".join(getattr(ask, "keys", ()))
    return CollectiveError(f"{what!r} was not in the ranks' store within {within_s:g} s: another rank is late or gone")


def _endpoint(host: str) -> str:
    if host == "localhost" or ipaddress.ip_address(check_host(host)).is_loopback:
        if sys.platform == "linux":
            return (
                f"ipc://@tidemill-{secrets.token_hex(NAME_BYTES)}"  # in the abstract namespace: nothing is left on disk
            )
        return "tcp://127.0.0.1:*"
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
