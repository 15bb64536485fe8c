"""Caller and Link: a client's side of the wire, for requests with answers and for a permanent connection."""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tidemill.dock.net.messages import Message, decode_answer, encode
from tidemill.dock.net.wire import HANDSHAKE_S, KNOCK_AGAIN_S, SEQ, Frames, dial, new_identity
from tidemill.errors import DockError

ANSWER_BYTES = 1 << 16  # read at once: most answers are much shorter, a long one comes in pieces
# A request without an answer for this long is sent again although nothing seemed to break: longer than any wait for
# rows or room, and shorter than a recovery may take. The other side recognises it by its number.
RESEND_S = 1.2


class Caller:
    """Sends one request at a time over one connection, and again when that broke; the other side answers a repeated
    request as it answered the first. One per thread."""

    def __init__(
        self,
        token: str,
        address: str,
        local: str = "",
        owner: bytes | None = None,
        decode: Callable[[bytes], Any] = decode_answer,
        patience_s: float = math.inf,
    ) -> None:
        """A connection that stays broken for `patience_s` is an error; 0 where another address can be tried."""
        self.address, self.resent = address, 0
        self._token, self._local, self._decode, self._patience_s = token, local, decode, patience_s
        self._identity = new_identity(owner)
        self._seq = 0
        self._page = memoryview(bytearray(ANSWER_BYTES))
        self._is_closed = False
        self._connection: socket.socket | None = None
        self._frames = Frames(b"client")
        self._poller = select.poll()
        _CALLERS.add(self)

    @property
    def is_local(self) -> bool:
        return self._connection is not None and self._connection.family == socket.AF_UNIX

    def ask(self, message: Message, within_s: float) -> Any:
        """Return the answer. Raises TimeoutError when there was none, although the request was repeated after every
        broken connection."""
        self._seq += 1
        seq, body = SEQ.pack(self._seq), encode(message)
        deadline, give_up = time.monotonic() + within_s, time.monotonic() + self._patience_s
        while True:
            try:
                left_s = max(KNOCK_AGAIN_S, deadline - time.monotonic())
                connection = self._connected(left_s)
                connection.sendall(self._frames.pack(seq, body))
                wait_s = min(RESEND_S, left_s) if self._patience_s else left_s
                return self._decode(self._answer_to(seq, connection, wait_s))
            except _Unanswered:
                give_up = time.monotonic() + self._patience_s
                if time.monotonic() >= deadline:
                    self._hang_up()  # a late answer must not be taken for another request's
                    raise TimeoutError(f"no answer from {self.address} within {within_s:.1f} s") from None
                self.resent += bool(self._patience_s)  # over the same connection: nothing says that it broke
            except OSError as error:  # broken, refused, or out of time
                self._hang_up()
                self._check_open()
                if time.monotonic() >= give_up:
                    raise ConnectionError(f"{self.address} went away: {error}") from None
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no answer from {self.address} within {within_s:.1f} s") from None
                self.resent += 1
                time.sleep(KNOCK_AGAIN_S)

    def tell(self, message: Message) -> None:
        """Send without waiting for an answer, or checking whether it arrived."""
        self._seq += 1
        with suppress(OSError, DockError):
            connection = self._connected(HANDSHAKE_S)
            connection.sendall(self._frames.pack(SEQ.pack(self._seq), encode(message)))

    def close(self) -> None:
        """Close, from any thread; a thread that waits for an answer is woken."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def become_another(self) -> None:
        """Take a new name in a forked child: the connection and the name are the parent's."""
        self._hang_up()
        self._identity = new_identity()

    def _connected(self, within_s: float) -> socket.socket:
        self._check_open()
        if self._connection is None:
            made = dial(self._token, self.address, self._local, self._identity, within_s)
            self._connection, self._frames = made
            self._poller = select.poll()
            self._poller.register(made[0], select.POLLIN)
            self._check_open()  # closed while connecting
        return self._connection

    def _check_open(self) -> None:
        if self._is_closed:
            self._hang_up()
            raise DockError("this dock is closed", "connect again")

    def _answer_to(self, seq: bytes, connection: socket.socket, within_s: float) -> bytes:
        until = time.monotonic() + within_s
        while True:
            # In `recv`, the kernel would also wake us when the server reads the request, at the server's cost.
            if not self._poller.poll(max(0.0, 1000 * (until - time.monotonic()))):
                raise _Unanswered
            n = connection.recv_into(self._page)
            if not n:
                raise ConnectionError("the other side closed the connection")
            for got, body in self._frames.unpack(self._page[:n]):
                if got == seq:
                    return body

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Unanswered(Exception):
    """No answer arrived in time, although nothing broke."""


_CALLERS: weakref.WeakSet[Caller] = weakref.WeakSet()


def _after_fork() -> None:
    for caller in list(_CALLERS):
        caller.become_another()


os.register_at_fork(after_in_child=_after_fork)


class Link:
    """Keeps up a warehouse's connection to the ledger, in a thread that also receives. Messages sent while it is
    down are lost; the warehouse announces itself again when it is up."""

    def __init__(self, token: str, address: str, hear: Callable[[Any], None]) -> None:
        """`hear` is called by the thread with every answer, and with None when the connection is new."""
        self._where = token, address, "", new_identity()
        self._hear = hear
        self._connection: socket.socket | None = None
        self._frames = Frames(b"client")
        self._asked, self._is_closed = 0, False
        threading.Thread(target=self._keep_up, name="link", daemon=True).start()

    def tell(self, message: Message) -> None:
        connection = self._connection
        if connection is not None:
            self._asked += 1
            with suppress(OSError):
                connection.sendall(self._frames.pack(SEQ.pack(self._asked), encode(message)))

    def close(self) -> None:
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _keep_up(self) -> None:
        page = memoryview(bytearray(ANSWER_BYTES))
        while not self._is_closed:
            try:
                connection, frames = dial(*self._where, HANDSHAKE_S)
            except OSError:
                time.sleep(KNOCK_AGAIN_S)
                continue
            self._frames, self._connection = frames, connection
            self._hear(None)
            with suppress(OSError), connection:
                while n := connection.recv_into(page):
                    for _, body in frames.unpack(page[:n]):
                        self._hear(decode_answer(body))
            self._connection = None
