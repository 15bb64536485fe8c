"""The door: how processes on the ledger's own machine speak to it, past the threads that ZeroMQ puts in between.

A round trip through ZeroMQ wakes four threads: 0.08 ms when all are awake, 0.45 ms when they slept. Through a Unix
socket it wakes one: 0.01 and 0.09 ms (two cores, measured side by side). What is said is the same: a request has a
number, and one sent again is answered again.

The socket has a name in the kernel's abstract namespace that follows from the token and the ledger's address: nothing
is left on disk, the next ledger finds the name free, and on another machine nobody answers to it. Both sides prove by
keyed hashes that they have the token, before a message is read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tidemill.dock.net.messages import Message, decode_answer, encode
from tidemill.dock.net.wire import HANDSHAKE_S, MAX_MESSAGE_BYTES, OWNER_BYTES, RESEND_S, SEQ, new_identity
from tidemill.errors import DockError

HEAD = struct.Struct("<I8s")  # length of the message, number of the request
IDENTITY_BYTES = len(new_identity())
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = IDENTITY_BYTES + NONCE_BYTES + PROOF_BYTES
READ_BYTES = 1 << 18
ANSWER_BYTES = 1 << 16  # a client's: most answers are much shorter, a long one comes in pieces
SEND_S = 5.0  # a ledger that takes nothing in for so long is asked over a new connection
AT_ONCE = 256
MAX_UNREAD_BYTES = 4 * MAX_MESSAGE_BYTES  # answers kept for a client that does not read; then it is let go
MAX_STRANGERS = 128  # who has not said yet who it is; beyond it the first to come is the first to go
KNOCK_AGAIN_S = 0.01

Letter = tuple[bytes, bytes, bytes]  # client, number, message


def door_name(token: str, address: str) -> str:
    """In the abstract namespace: a name that only holders of the token know."""
    digest = hashlib.blake2b(f"{token} {address}".encode(), digest_size=16, person=b"tm-door").hexdigest()
    return f"\0tidemill-{digest}"


def _proof(token: str, side: bytes, own: bytes, others: bytes) -> bytes:
    return hmac.digest(token.encode(), b"door-" + side + own + others, "sha256")


# -- the ledger's side ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Visitor:
    connection: socket.socket
    nonce: bytes
    since: float
    client: bytes = b""  # empty until it has proved that it knows the token
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)


class Door:
    """Never blocks and never raises for what a visitor does: it is let go, and counted where it was not let in or
    spoke nonsense."""

    def __init__(self, token: str, address: str) -> None:
        self.refused = 0
        self._token = token
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(door_name(token, address))
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._page = memoryview(bytearray(READ_BYTES))
        self._visitors: dict[int, Visitor] = {}
        self._clients: dict[bytes, Visitor] = {}
        self._owners: Counter[bytes] = Counter()  # connections of each
        self.left: list[bytes] = []  # clients that went since the caller last looked

    def fileno(self) -> int:
        """Readable when there is something to do."""
        return self._epoll.fileno()

    def has_owner(self, owner: bytes) -> bool:
        return owner in self._owners

    def watch(self, fd: int) -> None:
        """Let `wait` also come back when this file is readable."""
        self._epoll.register(fd, select.EPOLLIN)

    def wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """What happened, as (file, event): for `receive`, and of files to `watch`."""
        return self._epoll.poll(timeout_s, AT_ONCE)

    def receive(self, now: float, events: list[tuple[int, int]] | None = None) -> list[Letter]:
        """What came, of whoever is let in."""
        letters: list[Letter] = []
        for fd, event in self.wait(0) if events is None else events:
            visitor = self._visitors.get(fd)
            if visitor is None:
                if fd == self._listener.fileno():
                    self._let_in(now)
                continue
            if event & select.EPOLLOUT:
                self._push(visitor)
            if event & ~select.EPOLLOUT:
                letters.extend(self._read(visitor))
        return letters

    def send(self, client: bytes, seq: bytes, body: bytes) -> bool:
        """False: not a client of this door. One that left is forgotten; it asks again when it is back."""
        visitor = self._clients.get(client)
        if visitor is None:
            return False
        frame = HEAD.pack(len(body), seq) + body
        if not visitor.outbox:
            try:
                sent = visitor.connection.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(visitor)
                return True
            if sent == len(frame):
                return True
            frame = frame[sent:]
            self._epoll.modify(visitor.connection, select.EPOLLIN | select.EPOLLOUT)
        visitor.outbox += frame
        if len(visitor.outbox) > MAX_UNREAD_BYTES:
            self._refuse(visitor)
        return True

    def sweep(self, now: float) -> None:
        """Let those go who came and did not say who they are."""
        for visitor in [v for v in self._visitors.values() if not v.client and now - v.since > HANDSHAKE_S]:
            self._refuse(visitor)

    def close(self) -> None:
        for visitor in list(self._visitors.values()):
            self._drop(visitor)
        self._epoll.close()
        self._listener.close()

    def _let_in(self, now: float) -> None:
        strangers = [v for v in self._visitors.values() if not v.client]
        if len(strangers) >= MAX_STRANGERS:
            self._refuse(strangers[0])
        with suppress(OSError):  # gone before it was its turn
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            visitor = Visitor(connection, os.urandom(NONCE_BYTES), now)
            self._visitors[connection.fileno()] = visitor
            self._epoll.register(connection, select.EPOLLIN)
            connection.send(visitor.nonce)

    def _read(self, visitor: Visitor) -> Iterator[Letter]:
        try:
            n = visitor.connection.recv_into(self._page)
        except BlockingIOError:
            return
        except OSError:
            n = 0
        if not n:
            if visitor.inbox or not visitor.client:  # left in the middle of a sentence
                self.refused += 1
            self._drop(visitor)
            return
        if visitor.client and not visitor.inbox and _is_one_frame(self._page, n):  # nearly always
            yield visitor.client, bytes(self._page[4 : HEAD.size]), bytes(self._page[HEAD.size : n])
            return
        visitor.inbox += self._page[:n]
        if not visitor.client and not self._is_introduced(visitor):
            return
        at = 0
        inbox = visitor.inbox
        while at + HEAD.size <= len(inbox):
            length, seq = HEAD.unpack_from(inbox, at)
            if length > MAX_MESSAGE_BYTES:
                self._refuse(visitor)
                return
            start, end = at + HEAD.size, at + HEAD.size + length
            if end > len(inbox):
                break
            yield visitor.client, seq, bytes(inbox[start:end])
            at = end
        del inbox[:at]

    def _is_introduced(self, visitor: Visitor) -> bool:
        if len(visitor.inbox) < HELLO_BYTES:
            return False
        hello = bytes(visitor.inbox[:HELLO_BYTES])
        client, nonce = hello[:IDENTITY_BYTES], hello[IDENTITY_BYTES : IDENTITY_BYTES + NONCE_BYTES]
        expected = _proof(self._token, b"client", client + nonce, visitor.nonce)
        if not hmac.compare_digest(hello[-PROOF_BYTES:], expected):
            self._refuse(visitor)
            return False
        del visitor.inbox[:HELLO_BYTES]
        before = self._clients.get(client)
        if before is not None:  # it came back before its old connection was seen to end
            before.client = b""
            self._drop(before)
        else:
            self._owners[client[:OWNER_BYTES]] += 1
        visitor.client = client
        self._clients[client] = visitor
        with suppress(OSError):
            visitor.connection.send(_proof(self._token, b"server", visitor.nonce, nonce))
        return True

    def _push(self, visitor: Visitor) -> None:
        try:
            sent = visitor.connection.send(visitor.outbox)
        except BlockingIOError:
            return
        except OSError:
            self._drop(visitor)
            return
        del visitor.outbox[:sent]
        if not visitor.outbox:
            self._epoll.modify(visitor.connection, select.EPOLLIN)

    def _refuse(self, visitor: Visitor) -> None:
        self.refused += 1
        self._drop(visitor)

    def _drop(self, visitor: Visitor) -> None:
        self._visitors.pop(visitor.connection.fileno(), None)
        if visitor.client and self._clients.pop(visitor.client, None) is not None:
            self.left.append(visitor.client)
            owner = visitor.client[:OWNER_BYTES]
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
        visitor.connection.close()  # leaves the epoll by itself


# -- the clients' side ------------------------------------------------------------------------------------------------


class DoorCaller:
    """As wire.Caller: one request at a time, sent again when the connection broke. One per thread."""

    def __init__(self, token: str, address: str, owner: bytes | None = None) -> None:
        """Raises OSError when there is no such door on this machine."""
        self.address = address
        self.resent = 0
        self._token, self._name = token, door_name(token, address)
        self._identity = new_identity(owner)
        self._seq = 0
        self._inbox, self._page = bytearray(), memoryview(bytearray(ANSWER_BYTES))
        self._is_closed = False
        self._connection: socket.socket | None = self._knock(HANDSHAKE_S)
        _CALLERS.add(self)

    def ask(self, message: Message, within_s: float) -> Any:
        """The answer. Raises TimeoutError when nobody answered, though asked again after every broken connection."""
        self._seq += 1
        seq, body = SEQ.pack(self._seq), encode(message)
        frame = HEAD.pack(len(body), seq) + body
        deadline = time.monotonic() + within_s
        while True:
            if self._is_closed:
                raise DockError("this dock is closed", "connect again")
            try:
                left_s = max(KNOCK_AGAIN_S, deadline - time.monotonic())
                connection = self._connection
                if connection is None:
                    connection = self._connection = self._knock(left_s)
                connection.sendall(frame)
                try:
                    return decode_answer(self._answer_to(seq, connection, min(RESEND_S, left_s)))
                except TimeoutError:
                    if time.monotonic() >= deadline:
                        raise
                    self.resent += 1  # over the same connection: nothing says that it broke
            except OSError:  # broken, refused, or out of time
                self._hang_up()
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no answer from {self.address} within {within_s:.1f} s") from None
                self.resent += 1
                time.sleep(KNOCK_AGAIN_S)

    def close(self) -> None:
        """From any thread; the one that waits for an answer is woken."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def leave(self) -> None:
        self.close()

    def become_another(self) -> None:
        """In a forked child: the connection is the parent's, and so is the name."""
        self._hang_up()
        self._identity = new_identity()

    def _answer_to(self, seq: bytes, connection: socket.socket, within_s: float) -> bytes:
        inbox, page = self._inbox, self._page
        until = time.monotonic() + within_s
        while True:
            while len(inbox) >= HEAD.size:
                length, got = HEAD.unpack_from(inbox)
                end = HEAD.size + length
                if len(inbox) < end:
                    break
                body = bytes(inbox[HEAD.size : end])
                del inbox[:end]
                if got == seq:
                    return body
            # Asleep in `recv`, the kernel would also wake us when the ledger reads the question, at the ledger's cost.
            if not self._poller.poll(max(0.0, 1000 * (until - time.monotonic()))):
                raise TimeoutError
            n = connection.recv_into(page)
            if not n:
                raise ConnectionError("the ledger closed the door")
            if not inbox and page[4 : HEAD.size] == seq and _is_one_frame(page, n):  # nearly always
                return bytes(page[HEAD.size : n])
            inbox += page[:n]

    def _knock(self, within_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(min(within_s, HANDSHAKE_S))
            connection.connect(self._name)
            theirs = _exactly(connection, NONCE_BYTES)
            mine = os.urandom(NONCE_BYTES)
            name = self._identity + mine
            connection.sendall(name + _proof(self._token, b"client", name, theirs))
            proof = _exactly(connection, PROOF_BYTES)
            if not hmac.compare_digest(proof, _proof(self._token, b"server", theirs, mine)):
                raise ConnectionError("whoever answers at the dock's door does not know its token")
            # The kernel's timeout: Python's own would cost four more system calls a request.
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))
            self._poller = select.poll()
            self._poller.register(connection, select.POLLIN)
        except BaseException:
            connection.close()
            raise
        return connection

    def _hang_up(self) -> None:
        self._inbox.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


_CALLERS: weakref.WeakSet[DoorCaller] = weakref.WeakSet()


def _after_fork() -> None:
    for caller in list(_CALLERS):
        caller.become_another()


os.register_at_fork(after_in_child=_after_fork)


def _is_one_frame(page: memoryview, n: int) -> bool:
    """Whether the first `n` bytes are one message, all of it."""
    return n > HEAD.size and int.from_bytes(page[:4], "little") == n - HEAD.size


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    parts = b""
    while len(parts) < nbytes:
        came = connection.recv(nbytes - len(parts))
        if not came:
            raise ConnectionError("the ledger closed the door")
        parts += came
    return parts


def open_door(token: str, address: str) -> Door | None:
    """None where the system has none of it: then everybody comes over ZeroMQ."""
    if sys.platform != "linux":
        return None
    return Door(token, address)


def find_door(token: str, address: str, owner: bytes | None = None) -> DoorCaller | None:
    """None when the ledger is on another machine, or has no door."""
    if sys.platform != "linux":
        return None
    try:
        return DoorCaller(token, address, owner)
    except OSError:
        return None
