"""The byte stream between warehouses: the reader pulls ranges of a segment straight into its own. The sender sends from
its mapped segment, the receiver reads into its own: no byte passes through Python. Both sides prove that they have the
token, each by a keyed hash over both sides' random numbers, before a request is read."""

from __future__ import annotations

import errno
import hmac
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidemill.dock.net.messages import ChunkAt, Copy
from tidemill.dock.net.wire import NONCE_BYTES, PROOF_BYTES, check_host, exactly, proof
from tidemill.dock.store import segment as seg

HANDSHAKE_S = 5.0  # for all of it
IDLE_S = 60.0
STREAM_BYTES = 8 << 20  # each stream carries at least this much of a chunk: below, one stream is as fast
SOCKET_BUFFER = 4 << 20
MAX_STREAMS = 4  # each keeps a core busy on both sides: with two cores, a second stream only slows the first
MAX_CONNECTIONS = 256  # connections that have proved that they have the token
MAX_STRANGERS = 64  # other connections; beyond it the oldest one of the address with the most is closed
ACCEPT_AGAIN_S = 0.1
_REQUEST = struct.Struct("<QQQQ")  # segment, generation, offset, bytes
_OK, _GONE = b"\x01", b"\x00"


class StreamServer:
    """Serves this warehouse's bytes to others. One thread per connection: sending blocks without holding the
    interpreter."""

    def __init__(self, arena: Path, token: str, host: str, views: seg.Views) -> None:
        self._arena, self._token, self._views = arena, token, views
        self._listener = socket.create_server((check_host(host), 0), backlog=64)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.refused = 0
        self.sent_bytes = 0
        self._connections = threading.Semaphore(MAX_CONNECTIONS)
        self._strangers: dict[socket.socket, str] = {}  # and their addresses, in order of arrival
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True, name="stream-accept").start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):
                    return  # closed
                time.sleep(ACCEPT_AGAIN_S)  # such as no free file descriptors, which passes
                continue
            self._make_room(connection, str(peer[0]))
            threading.Thread(target=self._serve, args=(connection,), daemon=True, name="stream-serve").start()

    def _make_room(self, newcomer: socket.socket, peer: str) -> None:
        """Make room. A peer that holds connections without proof delays only others from its own address, each for
        HANDSHAKE_S at most: a peer with the token needs only a moment."""
        with self._lock:
            self._strangers[newcomer] = peer
            if len(self._strangers) > MAX_STRANGERS:
                most = Counter(self._strangers.values()).most_common(1)[0][0]
                oldest = next(one for one, where in self._strangers.items() if where == most)
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _serve(self, connection: socket.socket) -> None:
        is_let_in = False
        try:
            with connection:
                is_known = greet(connection, self._token, b"server")
                with self._lock:
                    self._strangers.pop(connection, None)
                is_let_in = is_known and self._connections.acquire(blocking=False)
                if is_let_in:
                    self._serve_known(connection)
        except OSError:
            pass  # the other side is gone; its pull fails there and is tried from another copy
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
            if is_let_in:
                self._connections.release()
            else:
                self.refused += 1

    def _serve_known(self, connection: socket.socket) -> None:
        _tune(connection)
        connection.settimeout(IDLE_S)
        while (request := _receive(connection, _REQUEST.size)) is not None:
            self._answer(connection, *_REQUEST.unpack(request))

    def _answer(self, connection: socket.socket, number: int, generation: int, offset: int, nbytes: int) -> None:
        try:
            held = self._views.read(self._arena, number, generation, offset, nbytes)
        except (seg.SegmentGone, ValueError, OverflowError):
            connection.sendall(_GONE)
            return
        connection.sendall(_OK)
        _send(connection, held.data)
        self.sent_bytes += nbytes


class Puller:
    """Fetches chunks from other warehouses, over a few connections to each."""

    def __init__(self, token: str, streams: int | None = None) -> None:
        self._token, self._streams = token, streams or max(1, min(MAX_STREAMS, (os.cpu_count() or 1) // 2))
        self._idle: dict[str, list[socket.socket]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="stream-pull")
        self._parts = ThreadPoolExecutor(max_workers=8, thread_name_prefix="stream-part")
        self.pulled_bytes = 0

    def submit(self, job: Any, *arguments: Any) -> Any:
        return self._pool.submit(job, *arguments)

    def pull(self, chunk: ChunkAt, sources: dict[int, str], into: memoryview) -> None:
        """Read the bytes of `chunk` from the first available copy."""
        failures = []
        self._close_idle_except(sources.values())
        for copy in chunk.copies:
            address = sources.get(copy.warehouse)
            if address is None:
                continue
            try:
                self._pull_from(address, copy, into)
            except (OSError, seg.SegmentGone) as error:
                failures.append(f"{address}: {error}")
                continue
            self.pulled_bytes += len(into)
            return
        why = "; ".join(failures) or "no holder known"
        raise seg.SegmentGone(f"no copy of chunk {chunk.key} can be pulled ({why})")

    def _close_idle_except(self, addresses: Collection[str]) -> None:
        """Close connections to warehouses that are gone."""
        with self._lock:
            for address in [address for address in self._idle if address not in addresses]:
                for connection in self._idle.pop(address):
                    connection.close()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._parts.shutdown(wait=False, cancel_futures=True)

    def _pull_from(self, address: str, copy: Copy, into: memoryview) -> None:
        n = max(1, min(self._streams, len(into) // STREAM_BYTES))
        bounds = [len(into) * i // n for i in range(n + 1)]
        jobs = [
            self._parts.submit(self._pull_range, address, copy, bounds[i], into[bounds[i] : bounds[i + 1]])
            for i in range(1, n)
        ]
        try:
            self._pull_range(address, copy, 0, into[: bounds[1]])
        finally:
            wait(jobs)  # whatever failed, nothing may be written here afterwards
        for job in jobs:
            job.result()

    def _pull_range(self, address: str, copy: Copy, start: int, into: memoryview) -> None:
        connection, is_reused = self._connection(address)
        request = _REQUEST.pack(copy.segment, copy.generation, copy.offset + start, len(into))
        try:
            connection.sendall(request)
            status = _receive(connection, 1)
            if status is None and is_reused:  # closed while idle; a fresh one shows whether the other side lives
                connection.close()
                connection, _ = self._connection(address, fresh=True)
                connection.sendall(request)
                status = _receive(connection, 1)
            if status is None:
                raise ConnectionError("closed the stream")
            if status != _OK:
                raise seg.SegmentGone("no longer holds it")
            _receive_into(connection, into)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(address, []).append(connection)

    def _connection(self, address: str, fresh: bool = False) -> tuple[socket.socket, bool]:
        with self._lock:
            idle = self._idle.get(address)
            if idle and not fresh:
                return idle.pop(), True
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
        try:
            if not greet(connection, self._token, b"client"):
                raise ConnectionError("does not know the dock's token")
            _tune(connection)
            connection.settimeout(IDLE_S)
        except BaseException:
            connection.close()
            raise
        return connection, False


def greet(connection: socket.socket, token: str, side: bytes) -> bool:
    """Prove to each other that both sides know the token, without sending it, within HANDSHAKE_S."""
    until = time.monotonic() + HANDSHAKE_S
    mine = os.urandom(NONCE_BYTES)
    other = b"stream-client" if side == b"server" else b"stream-server"
    try:
        connection.settimeout(HANDSHAKE_S)
        connection.sendall(mine)
        theirs = exactly(connection, NONCE_BYTES, until)
        if theirs == mine:
            return False
        connection.sendall(proof(token, b"stream-" + side, mine, theirs))
        shown = exactly(connection, PROOF_BYTES, until)
    except ConnectionError:
        return False
    return hmac.compare_digest(shown, proof(token, other, theirs, mine))


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)


def _send(connection: socket.socket, view: memoryview) -> None:
    """Send from the mapped segment: sendfile, page by page, reaches two thirds of this speed over loopback."""
    connection.settimeout(None)  # Python's timeout would be for all bytes together; the kernel's is for progress
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(IDLE_S), 0))
    connection.sendall(view)
    connection.settimeout(IDLE_S)


def _receive(connection: socket.socket, nbytes: int) -> bytes | None:
    buffer = bytearray(nbytes)
    try:
        _receive_into(connection, memoryview(buffer))
    except ConnectionError:
        return None
    return bytes(buffer)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        n = connection.recv_into(view)
        if n == 0:
            raise ConnectionError("the other side closed the stream")
        view = view[n:]
