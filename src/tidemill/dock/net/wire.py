"""The wire: sockets that only holders of the dock's token can use, and a caller that survives restarts.

Every socket is a CURVE socket whose keys come from the token: a peer without it does not get past the handshake, and
what it sends is not parsed.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections import deque
from typing import Any

import zmq
import zmq.utils.monitor
from zmq.utils import z85

from tidemill.dock.net.messages import Message, decode_answer, encode
from tidemill.errors import DockError

MAX_MESSAGE_BYTES = 64 << 20  # metadata of two million rows; a longer message closes its connection
RESEND_CHECK_S = 0.1  # how often a caller that waits looks whether its connection broke
# A request that was not answered for so long is sent again though nothing seemed to break: longer than anyone is made
# to wait for rows or room, and short of what a recovery may take. The other side knows it by its number.
RESEND_S = 1.2
HANDSHAKE_S = 3.0
PROMPT_CHECK_S = 0.02  # the same where the caller knows another address to try
SEQ = struct.Struct("<Q")
OWNER_BYTES = 8


def curve_keys(token: str, side: str) -> tuple[bytes, bytes]:
    """(public, secret) of the server's or the clients' side, made from the token alone."""
    secret = z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=f"tm-{side}".encode()).digest())
    return zmq.curve_public(secret), secret


def check_host(host: str) -> str:
    if host in ("", "*", "0.0.0.0", "::"):
        raise DockError(f"a dock does not listen on every interface, got {host!r}", "name the cluster's own address")
    return host


def bound_address(socket: zmq.Socket[bytes]) -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


class Doorkeeper:
    """Answers libzmq's question whether a key may enter (ZAP)."""

    def __init__(self, context: zmq.Context[Any], token: str) -> None:
        self._allowed = z85.decode(curve_keys(token, "client")[0])
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer_all(self) -> None:
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.answer()

    def answer(self) -> None:
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        is_known = mechanism == b"CURVE" and credentials == [self._allowed]
        status = [b"200", b"OK"] if is_known else [b"400", b"unknown key"]
        self.socket.send_multipart([version, request, *status, b"peer", b""])


class Gate:
    """Counts who came to a listening socket and did not get in: connections that ended, or sat, without a handshake.
    libzmq says that someone came and that someone got in, but not who; so those who came are only counted down."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.refused = 0
        self._waiting: deque[float] = deque()
        self.socket = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def watch(self, now: float) -> None:
        while self.socket.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self.socket)["event"]
            if event == zmq.EVENT_ACCEPTED:
                self._waiting.append(now)
            elif self._waiting:
                self._waiting.pop()
        while self._waiting and now - self._waiting[0] > HANDSHAKE_S + 1.0:
            self._waiting.popleft()
            self.refused += 1


def listening_socket(context: zmq.Context[Any], token: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = curve_keys(token, "server")
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.router_handover = True  # a client that reconnects under its name replaces its old connection
    socket.handshake_ivl = int(1000 * HANDSHAKE_S)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    return socket


def calling_socket(context: zmq.Context[Any], token: str, identity: bytes, address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.identity = identity
    socket.curve_serverkey = curve_keys(token, "server")[0]
    socket.curve_publickey, socket.curve_secretkey = curve_keys(token, "client")
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.reconnect_ivl, socket.reconnect_ivl_max = 10, 100
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.connect(address)
    return socket


def new_identity(owner: bytes | None = None) -> bytes:
    """A name for one connection. It starts with its owner's: all connections of one dock object have the same."""
    return (owner or new_owner()) + os.urandom(16 - OWNER_BYTES)


def new_owner() -> bytes:
    return b"c" + os.urandom(OWNER_BYTES - 1)  # ZeroMQ keeps names that start with a zero byte for itself


class Caller:
    """One request at a time over one socket; sends again when the connection broke, and the other side answers a
    repeated request as it answered the first. One per thread."""

    def __init__(self, token: str, address: str, resends: bool = True) -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        self._socket = calling_socket(context, token, new_identity(), address)
        # Who knows another address to try also wants to hear that nobody listens at this one.
        events = zmq.EVENT_DISCONNECTED if resends else zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        self._monitor = self._socket.get_monitor_socket(events)
        self._seq = 0
        self.address = address
        self._resends = resends
        self._is_left = False
        self._busy = threading.Lock()  # a socket must not be closed under whoever uses it
        self.resent = 0

    def ask(self, message: Message, within_s: float) -> Any:
        """The answer. Raises TimeoutError when nobody answered, though asked again after every broken connection."""
        try:
            with self._busy:
                return self._ask(message, within_s)
        finally:
            self._end_if_left()

    def _ask(self, message: Message, within_s: float) -> Any:
        if self._is_left:
            raise DockError("this dock was left", "connect again")
        self._seq += 1
        seq, body = SEQ.pack(self._seq), encode(message)
        sent = time.monotonic()
        deadline = sent + within_s
        self._socket.send_multipart((seq, body))
        while True:
            pause_s = min(RESEND_CHECK_S if self._resends else PROMPT_CHECK_S, deadline - time.monotonic())
            if self._socket.poll(max(1, int(1000 * pause_s))):
                got, answer = self._socket.recv_multipart()
                if got == seq:
                    return decode_answer(answer)
                continue  # the answer to a request given up or sent twice
            if self._is_left:
                raise DockError("this dock was left", "connect again")
            is_broken, now = self._is_broken(), time.monotonic()
            if is_broken and not self._resends:
                raise ConnectionError(f"{self.address} went away")
            if is_broken or (self._resends and now - sent > RESEND_S and now < deadline):
                self.resent += 1
                self._socket.send_multipart((seq, body))
                sent = now
            elif now >= deadline:
                raise TimeoutError(f"no answer from {self.address} within {within_s:.1f} s")

    def tell(self, message: Message) -> None:
        """Without waiting for an answer."""
        with self._busy:
            if not self._is_left:
                self._seq += 1
                self._socket.send_multipart((SEQ.pack(self._seq), encode(message)))
        self._end_if_left()

    def leave(self) -> None:
        """From any thread: whoever waits for an answer is woken and closes the socket."""
        self._is_left = True

    def close(self) -> None:
        """As `leave`; from any thread too."""
        self._is_left = True
        self._end_if_left()

    def _end_if_left(self) -> None:
        """Unless somebody uses the socket, who comes here after letting go of it: so the last one closes it."""
        if self._is_left and self._busy.acquire(blocking=False):
            try:
                if not self._socket.closed:
                    self._socket.disable_monitor()
                    self._socket.close()
            finally:
                self._busy.release()

    def _is_broken(self) -> bool:
        was_broken = False
        while self._monitor.poll(0):
            zmq.utils.monitor.recv_monitor_message(self._monitor)
            was_broken = True
        return was_broken
