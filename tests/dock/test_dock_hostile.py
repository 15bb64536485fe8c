"""Whatever arrives on the dock's sockets from who has no business there is refused and counted; nothing crashes."""

import os
import random
import socket
import struct
import time

import msgspec
import pytest
from tests.dock.test_dock_remote import LEARN, rows

from tidemill.dock import Want
from tidemill.dock.address import Address
from tidemill.dock.net import messages as m
from tidemill.dock.net.caller import Caller
from tidemill.dock.net.stream import greet
from tidemill.dock.net.wire import HEAD, MAX_MESSAGE_BYTES, SEQ, dial, new_identity
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup

SEED = int(os.environ.get("FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DockServer(DockSetup(LEARN), tmp_path_factory.mktemp("dock")) as made:
        yield made


def doors(server):
    """host, port of the ledger, of the warehouse's control socket and of its byte stream."""
    hello = server.wait_announced("node0")
    addresses = [server.address.ledger.removeprefix("tcp://"), hello.control.removeprefix("tcp://"), hello.data]
    return [(a.rpartition(":")[0], int(a.rpartition(":")[2])) for a in addresses]


def refused(dock) -> int:
    figures = dock.figures()
    return figures["refused"] + sum(w.get("refused", 0) for w in figures["warehouses"].values())


def still_works(server, first_id):
    dock = server.connect()
    dock.put(rows([first_id]))
    lease = dock.take("learn", Want(rows=1), wait=60)
    assert lease.batch.values("x")[0, 0] == first_id
    lease.commit()
    assert server.ledger.restarts == 0 and server.warehouses["node0"].restarts == 0
    dock.close()


def wait_for_more(dock, before):
    deadline = time.monotonic() + 60
    while refused(dock) <= before:
        assert time.monotonic() < deadline, "nothing was counted"
        time.sleep(0.05)


def test_random_bytes_are_refused_and_counted(server):
    rng = random.Random(SEED)
    dock = server.connect()
    before = refused(dock)
    for door in doors(server):
        for _ in range(30):
            with socket.create_connection(door, timeout=5) as peer:
                try:
                    peer.sendall(rng.randbytes(rng.randint(1, 4000)))
                    peer.shutdown(socket.SHUT_WR)
                except OSError:
                    continue  # hung up on already: just as well
    wait_for_more(dock, before)
    still_works(server, 1)
    dock.close()


def test_a_greeting_cut_short_or_with_a_huge_length_is_refused(server):
    huge = struct.pack("<I8s", (1 << 32) - 1, bytes(8))
    for door in doors(server)[:2]:
        for piece in (b"", bytes(11), bytes(79), bytes(80), huge, bytes(80) + huge):
            with socket.create_connection(door, timeout=5) as peer:
                peer.sendall(piece)
    still_works(server, 2)


def test_a_wrong_token_does_not_get_in(server):
    dock = server.connect()
    before = refused(dock)
    stranger = Caller("not the token", server.address.ledger)
    with pytest.raises(TimeoutError):
        stranger.ask(m.AskState(), within_s=0.5)
    stranger.close()
    host, port = doors(server)[2]
    with socket.create_connection((host, port), timeout=5) as peer:
        assert not greet(peer, "not the token", b"client")
    wait_for_more(dock, before)
    still_works(server, 3)
    dock.close()


def test_without_proof_nobody_is_heard(server):
    body = m.encode(m.AskState())
    with socket.create_connection(doors(server)[0], timeout=5) as peer:
        peer.sendall(bytes(48) + bytes(32) + HEAD.pack(len(body), SEQ.pack(1)) + body)
        peer.recv(32)  # the nonce, then nothing more
        assert peer.recv(1) == b""
    still_works(server, 4)


def test_nonsense_from_a_peer_with_the_token_is_refused_and_counted(server):
    rng = random.Random(SEED)
    dock = server.connect()
    before = refused(dock)
    hello = server.wait_announced("node0")
    good = m.encode(m.Put(b"12345678", b"12345678", None, m.Outputs(("x",), 8, (m.Copy(1, 2, 3, 4),)), "", 0.0))
    bodies = [good[:n] for n in range(0, len(good), 7)] + [rng.randbytes(rng.randint(0, 200)) for _ in range(50)]
    bodies += [bytes(b ^ (rng.random() < 0.1) * rng.randint(1, 255) for b in good) for _ in range(50)]
    bodies += [
        msgspec.msgpack.encode(["Take", "learn", {"rows": -1}, 0.0]),
        msgspec.msgpack.encode(["Take", "learn", {"rows": 1, "sampler": "x" * 10_000}, 0.0]),
        msgspec.msgpack.encode(["Commit", 2**62, [[], 0, [], b"1", None, None], b"123"]),
        msgspec.msgpack.encode(["Retire", 1, {1: 2}]),
        msgspec.msgpack.encode(["Lend", -5]),
        msgspec.msgpack.encode(["Lend", 2**62]),
        msgspec.msgpack.encode(["Fetch", [1, 2**40, []], {}]),
    ]
    for address in (server.address.ledger, hello.control):
        peer, frames = dial(server.address.token, address, "", new_identity(), 5.0)
        with peer:
            for i, body in enumerate(bodies):
                peer.sendall(frames.pack(SEQ.pack(i + 1), body))
            peer.settimeout(5)
            assert frames.unpack(memoryview(peer.recv(1 << 16)))
    wait_for_more(dock, before)
    still_works(server, 5)
    dock.close()


def test_a_message_longer_than_allowed_closes_its_connection_only(server):
    peer, _ = dial(server.address.token, server.address.ledger, "", new_identity(), 5.0)
    with peer:
        peer.sendall(HEAD.pack(MAX_MESSAGE_BYTES + 1, SEQ.pack(1)))
        peer.settimeout(5)
        assert peer.recv(1) == b""
    still_works(server, 6)


def test_a_stream_request_for_what_is_not_there_is_answered_no(server):
    host, port = doors(server)[2]
    with socket.create_connection((host, port), timeout=5) as peer:
        assert greet(peer, server.address.token, b"client")
        for request in ((0, 99, 0, 8), (10**6, 0, 0, 8), (0, 0, 2**63, 2**63), (0, 0, 0, 2**62)):
            peer.sendall(struct.pack("<QQQQ", *request))
            assert peer.recv(1) == b"\x00", request
    still_works(server, 7)


def test_a_token_stays_out_of_sight(tmp_path):
    address = Address("tcp://127.0.0.1:1", "secret")
    address.save(tmp_path)
    assert "secret" not in repr(address)
    assert (tmp_path / "address.json").stat().st_mode & 0o077 == 0
    assert Address.find(tmp_path) == address
