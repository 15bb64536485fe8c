"""Another user of the same machine sees ports and socket names. He can hold neither the ledger's place nor the byte
stream's connections."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

from tidemill.batch import Batch
from tidemill.dock import Want
from tidemill.dock.net import stream
from tidemill.dock.net.wire import SOCKET_FILE
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup
from tidemill.graph import Stage

NOBODY = 65534
STAGES = (Stage("learn", "actor", ("x",)),)
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DockServer]:
    with DockServer(DockSetup(STAGES), tmp_path / "dock") as made:
        yield made


def as_nobody(attack: Callable[[], str]) -> Callable[[], str]:
    """Start `attack` in a process of another user. Returns what waits for its result."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(write, attack().encode())
        finally:
            os._exit(0)
    os.close(write)

    def result() -> str:
        with os.fdopen(read) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        return said

    return result


def passes_a_row(server: DockServer, number: int, node: str | None = None) -> None:
    dock = server.connect(node)
    dock.put(Batch({"id": np.array([number]), "group": np.array([number]), "x": np.array([number])}))
    lease = dock.take("learn", Want(rows=1), wait=20)
    assert lease is not None and lease.batch.values("x").tolist() == [number]
    lease.commit()
    dock.close()


def unix_names(pid: int) -> list[str]:
    """Names of the Unix sockets that a process listens on, as everybody can read them."""
    own = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.exists() or file.is_symlink()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({line[7] for line in lines if len(line) > 7 and f"socket:[{line[6]}]" in own})


def bind_for(seconds: float, places: list[tuple[int, Any]]) -> str:
    """Try again and again to listen where somebody else does; how often it worked."""
    until, held = time.monotonic() + seconds, []
    while time.monotonic() < until:
        for family, place in places:
            one = socket.socket(family)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(place)
                one.listen()
                held.append(one)
            except OSError:
                one.close()
    return str(len(held))


@as_root
def test_another_user_cannot_take_the_place_of_a_dead_ledger(server: DockServer) -> None:
    """Killed again and again while somebody tries all the time to bind its port and its socket file."""
    host, _, port = server.address.ledger.removeprefix("tcp://").rpartition(":")
    names = unix_names(server.ledger.pid)
    assert len(names) == 1 and names[0].endswith(SOCKET_FILE)  # and none that anybody can bind
    thief = as_nobody(lambda: bind_for(3.0, [(socket.AF_INET, (host, int(port))), (socket.AF_UNIX, names[0])]))
    for number in range(8):
        os.kill(server.ledger.pid, signal.SIGKILL)
        passes_a_row(server, number)
    assert thief() == "0"
    assert server.ledger.error is None and server.ledger.restarts >= 8


@as_root
def test_another_user_cannot_open_the_ledgers_socket_file(server: DockServer) -> None:
    def attack() -> str:
        try:
            socket.socket(socket.AF_UNIX).connect(server.address.local)
        except OSError as error:
            return type(error).__name__
        return "in"

    os.chmod(server.folder, 0o755)  # as a folder that was there before may be
    assert as_nobody(attack)() == "PermissionError"


def test_connections_that_send_a_byte_a_second_do_not_hold_the_byte_stream(
    server: DockServer,
) -> None:
    """More of them than the stream has places for anybody."""
    host, _, port = server.wait_announced("node0").data.rpartition(":")
    server.add_warehouse("node1")
    server.warehouses["node1"].wait_ready()
    server.wait_announced("node1")
    with ExitStack() as stack:
        slow = []
        for _ in range(stream.MAX_CONNECTIONS + 44):
            slow.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=5)))
        writer, reader = server.connect("node0"), server.connect("node1")
        for number in range(3):
            for one in slow:
                try:
                    one.send(b"x")
                except OSError:
                    continue  # let go
            writer.put(Batch({"id": np.array([number]), "group": np.array([number]), "x": np.arange(1)}))
            started = time.monotonic()
            lease = reader.take("learn", Want(rows=1), wait=20)
            assert lease is not None and len(lease.batch.values("x")) == 1
            assert time.monotonic() - started < 5
            lease.commit()
        until = time.monotonic() + 10
        while not reader.figures()["warehouses"]["node1"].get("pulled_bytes"):  # told with the next heartbeat
            assert time.monotonic() < until
        writer.close()
        reader.close()


def test_a_handshake_has_one_deadline_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HANDSHAKE_S", 0.5)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(0.1)
        result: list[object] = []

        def greet() -> None:
            try:
                result.append(stream.greet(ours, "token", b"server"))
            except OSError as error:
                result.append(error)

        thread = threading.Thread(target=greet)
        started = time.monotonic()
        thread.start()
        while thread.is_alive() and time.monotonic() - started < 5:
            theirs.send(b"x")  # each byte in time, all together too late
            time.sleep(0.05)
        thread.join()
        assert time.monotonic() - started < 2 and isinstance(result[0], TimeoutError)
