"""A run listens where docs/security.md says and nowhere else, on this machine alone, and refuses who has no key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import listeners, strangers
from tests.hostile.listeners import Listener, Row

pytest.importorskip("zmq")

from tests.cluster.runs import train
from tidemill.cluster.driver.remote import RemoteWorkers
from tidemill.run.loop import Watcher

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
TABLE = listeners.table(PAGE)
OWNER, RAYS = "the same user", "Ray's own"
GREETING_BYTES = 64  # a CURVE socket's greeting, or two random numbers: what is said before a key is asked for

# Goes to every place, says what a client without a key can say, and prints how many bytes came back of each.
KNOCK = r"""
import json, socket, sys
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
REQUEST = b"\x00\x08" + bytes(8)
found = []
for kind, place in json.loads(sys.argv[1]):
    host, _, port = place.rpartition(":")
    try:
        if kind == "tcp":
            peer = socket.create_connection((host, int(port)), 5)
        else:
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(5)
            peer.connect("\0" + place[1:] if place.startswith("@") else place)
        peer.settimeout(1)
        seen = 0
        for said in (GREETING, READY + REQUEST, bytes(512)):
            try:
                peer.sendall(said)
                seen += len(peer.recv(1 << 16))
            except OSError:
                pass
        found.append(seen)
    except OSError as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""


class Scan(Watcher):
    """Looks, in the middle of a run, at what its processes listen on, and knocks there as another user."""

    def __init__(self) -> None:
        self.found: set[Listener] = set()
        self.before = listeners.of_descendants(os.getpid())
        self.answers: dict[Listener, Any] = {}
        self.lost = 0

    def started(self, workers: Any, first_step: int) -> None:
        self.workers: RemoteWorkers = workers

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self.found |= listeners.of_descendants(os.getpid()) - self.before
        if step == 2 and strangers.PYTHON is not None:
            asked = sorted(self.found)
            said = strangers.told(strangers.start(KNOCK, json.dumps([(x.kind, x.place) for x in asked])))
            self.answers = dict(zip(asked, json.loads(said)))
        self.lost = self.workers.crew.lost_total


def row_of(found: Listener) -> Row:
    rows = [row for row in TABLE if row.covers(found)]
    assert rows, f"{found} is not in the table of {PAGE.name}"
    return rows[0]


def check(scan: Scan, address: str) -> None:
    assert len(scan.found) > 4 and scan.lost == 0
    assert {found.process for found in scan.found} >= {"ledger", "warehouse", "worker", "fork server"}
    for found in scan.found:
        if row_of(found).opened_with != RAYS and found.kind == "tcp":
            assert found.place.startswith(f"{address}:"), f"{found} can be reached from elsewhere"
    for found, answer in scan.answers.items():
        if row_of(found).opened_with == RAYS:
            continue
        if row_of(found).opened_with == OWNER:
            assert answer in ("PermissionError", "FileNotFoundError"), (found, answer)
        else:
            assert isinstance(answer, int) and answer <= GREETING_BYTES, (found, answer)


def test_the_page_lists_where_a_run_listens() -> None:
    assert {row.process for row in TABLE} >= {"ledger", "warehouse", "worker", "fork server"}
    assert all(row.opened_with for row in TABLE)


@pytest.mark.parametrize(
    "over",
    [
        {"rollout": {"tp": 2}},
        pytest.param({"rollout": {"tp": 2}, "learn": {"parallel": {"fsdp": 2}}}, marks=pytest.mark.slow),
    ],
    ids=["engine", "learner"],
)
def test_a_run_on_processes_listens_only_where_the_page_says_and_only_here(
    tmp_path: Path, over: dict[str, Any]
) -> None:
    scan = Scan()
    train(tmp_path, scan, train={"steps": 3}, **over)
    check(scan, "127.0.0.1")
    assert not any(row_of(found).opened_with == RAYS for found in scan.found)


@pytest.mark.slow
def test_a_run_on_ray_listens_only_on_the_address_that_ray_uses(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    scan = Scan()
    train(tmp_path, scan, train={"steps": 3}, rollout={"tp": 2}, cluster={"executor": "ray"})
    check(scan, ray.util.get_node_ip_address())
