"""WireServer: the server's side of the wire, many connections in one thread."""

from __future__ import annotations

import hmac
import os
import select
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tidemill.dock.net.wire import (
    HANDSHAKE_S,
    HELLO_BYTES,
    IDENTITY_BYTES,
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    OWNER_BYTES,
    PROOF_BYTES,
    Frames,
    frames_of,
    proof,
    tune,
)

READ_BYTES = 1 << 18
AT_ONCE = 256
MAX_UNREAD_BYTES = (
    4 * MAX_MESSAGE_BYTES
)  # answers kept for a client that does not read; beyond it the client is disconnected
MAX_STRANGERS = 128  # connections that have not proved anything yet; beyond it the oldest is closed

Letter = tuple[bytes, bytes, bytes]  # client, number, message


@dataclass(slots=True, eq=False)
class Peer:
    connection: socket.socket
    nonce: bytes
    since: float
    client: bytes = b""  # empty until it has proved that it has the token
    frames: Frames = field(default_factory=lambda: Frames(b"server"))
    outbox: bytearray = field(default_factory=bytearray)

    @property
    def is_local(self) -> bool:
        return self.connection.family == socket.AF_UNIX


class WireServer:
    """Never blocks, and never raises for what a peer does: a peer that fails the proof or sends malformed frames is
    disconnected and counted."""

    def __init__(self, token: str, listeners: Sequence[socket.socket]) -> None:
        self.refused = 0
        self._token = token
        self._epoll = select.epoll()
        self._listeners = {listener.fileno(): listener for listener in listeners}
        for listener in listeners:
            listener.setblocking(False)
            self._epoll.register(listener, select.EPOLLIN)
        self._page = memoryview(bytearray(READ_BYTES))
        self._peers: dict[int, Peer] = {}
        self._clients: dict[bytes, Peer] = {}
        self._owners: Counter[bytes] = Counter()  # local connections of each
        self.left: list[
            tuple[bytes, bool]
        ] = []  # clients that left since the caller's last check, and whether each was local

    def fileno(self) -> int:
        """Readable when there is something to do."""
        return self._epoll.fileno()

    def has_owner(self, owner: bytes) -> bool:
        return owner in self._owners

    def watch(self, fd: int) -> None:
        """Let `wait` also return when this file is readable."""
        self._epoll.register(fd, select.EPOLLIN)

    def wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for events, as (file, event): for `receive`, and of watched files."""
        return self._epoll.poll(timeout_s, AT_ONCE)

    def receive(self, now: float, events: list[tuple[int, int]] | None = None) -> list[Letter]:
        """Return the messages of authenticated clients."""
        letters: list[Letter] = []
        for fd, event in self.wait(0) if events is None else events:
            peer = self._peers.get(fd)
            if peer is None:
                if fd in self._listeners:
                    self._let_in(self._listeners[fd], now)
                continue
            if event & select.EPOLLOUT:
                self._push(peer)
            if event & ~select.EPOLLOUT:
                letters.extend(self._read(peer))
        return letters

    def send(self, client: bytes, seq: bytes, body: bytes) -> None:
        """Send an answer. A client that has left gets nothing; it asks again when it is back."""
        peer = self._clients.get(client)
        if peer is None:
            return
        frame = peer.frames.pack(seq, body)
        if not peer.outbox:
            try:
                sent = peer.connection.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(peer)
                return
            if sent == len(frame):
                return
            frame = frame[sent:]
            self._epoll.modify(peer.connection, select.EPOLLIN | select.EPOLLOUT)
        peer.outbox += frame
        if len(peer.outbox) > MAX_UNREAD_BYTES:
            self._refuse(peer)

    def sweep(self, now: float) -> None:
        """Disconnect peers that have not authenticated in time."""
        for peer in [p for p in self._peers.values() if not p.client and now - p.since > HANDSHAKE_S]:
            self._refuse(peer)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._epoll.close()
        for listener in self._listeners.values():
            listener.close()

    def _let_in(self, listener: socket.socket, now: float) -> None:
        strangers = [p for p in self._peers.values() if not p.client]
        if len(strangers) >= MAX_STRANGERS:
            self._refuse(strangers[0])
        with suppress(OSError):  # it left before it was accepted
            connection, _ = listener.accept()
            connection.setblocking(False)
            tune(connection)
            peer = Peer(connection, os.urandom(NONCE_BYTES), now)
            self._peers[connection.fileno()] = peer
            self._epoll.register(connection, select.EPOLLIN)
            connection.send(peer.nonce)

    def _read(self, peer: Peer) -> list[Letter]:
        try:
            n = peer.connection.recv_into(self._page)
        except BlockingIOError:
            return []
        except OSError:
            n = 0
        if not n:
            if peer.frames.inbox or not peer.client:  # disconnected within a frame
                self.refused += 1
            self._drop(peer)
            return []
        came = self._page[:n]
        if not peer.client:
            peer.frames.inbox += came
            if not self._is_introduced(peer):
                return []
            came = memoryview(b"")
        try:
            return [(peer.client, seq, body) for seq, body in peer.frames.unpack(came)]
        except ConnectionError:
            self._refuse(peer)
            return []

    def _is_introduced(self, peer: Peer) -> bool:
        inbox = peer.frames.inbox
        if len(inbox) < HELLO_BYTES:
            return False
        hello, more = bytes(inbox[:HELLO_BYTES]), inbox[HELLO_BYTES:]
        client, nonce = hello[:IDENTITY_BYTES], hello[IDENTITY_BYTES : IDENTITY_BYTES + NONCE_BYTES]
        if not hmac.compare_digest(hello[-PROOF_BYTES:], proof(self._token, b"client", client + nonce, peer.nonce)):
            self._refuse(peer)
            return False
        before = self._clients.pop(client, None)
        if before is not None:  # it reconnected before the end of its old connection was noticed
            self._uncount(before)
            before.client = b""
            self._drop(before)
        if peer.is_local:
            self._owners[client[:OWNER_BYTES]] += 1
        peer.client, self._clients[client] = client, peer
        peer.frames = frames_of(peer.connection, self._token, b"server", peer.nonce + nonce)
        peer.frames.inbox += more
        with suppress(OSError):
            peer.connection.send(proof(self._token, b"server", peer.nonce, nonce))
        return True

    def _push(self, peer: Peer) -> None:
        try:
            sent = peer.connection.send(peer.outbox)
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)
            return
        del peer.outbox[:sent]
        if not peer.outbox:
            self._epoll.modify(peer.connection, select.EPOLLIN)

    def _refuse(self, peer: Peer) -> None:
        self.refused += 1
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        self._peers.pop(peer.connection.fileno(), None)
        if peer.client and self._clients.pop(peer.client, None) is not None:
            self.left.append((peer.client, peer.is_local))
            self._uncount(peer)
        peer.connection.close()  # which also removes it from the epoll

    def _uncount(self, peer: Peer) -> None:
        owner = peer.client[:OWNER_BYTES]
        if peer.is_local:
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
