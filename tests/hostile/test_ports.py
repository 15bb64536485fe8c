"""A run listens where docs/security.md says and nowhere else, refuses who has no key, and keeps its files to itself."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import listeners, strangers
from tests.hostile.listeners import Listener, Row

pytest.importorskip("msgspec")

from tests.cluster.runs import train
from tidemill.cluster.driver.driver import Driver
from tidemill.run.watcher import Watcher

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
TABLE = listeners.table(PAGE)
OWNER, RAYS = "the same user", "Ray's own"
PUBLIC = (Path("/dev/shm"), Path(tempfile.gettempdir()))  # folders that everybody may write to
GREETING_BYTES = 64  # random numbers that a server sends before it asks for proof of a key

# Goes to every place, says what a client without a key can say, and prints how many bytes came back of each.
KNOCK = r"""
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
HELLO = bytes(80)  # a client's name, its random number and a proof, made without the key
REQUEST = (8).to_bytes(4, "little") + bytes(16)

def knock(listener):
    kind, place = listener
    host, _, port = place.rpartition(":")
    try:
        if kind == "tcp":
            peer = socket.create_connection((host, int(port)), 5)
        else:
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(5)
            peer.connect("\0" + place[1:] if place.startswith("@") else place)
    except OSError as error:
        return type(error).__name__
    peer.settimeout(1)
    seen = 0
    if kind == "tcp":
        with socket.create_connection((host, int(port)), 5) as asking:
            asking.settimeout(2)
            asking.sendall(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            try:
                said = asking.recv(100)
            except OSError:
                said = b""
            if said.startswith(b"HTTP/"):
                return "HTTP " + said.split()[1].decode()
    for said in (HELLO, REQUEST, bytes(512)):
        try:
            peer.sendall(said)
            seen += len(peer.recv(1 << 16))
        except OSError:
            pass
    return seen

with ThreadPoolExecutor(64) as threads:
    found = list(threads.map(knock, json.loads(sys.argv[1])))
print(json.dumps(found))
"""


class Scan(Watcher):
    """Looks, in the middle of a run, at what its processes listen on, and knocks there as another user."""

    def __init__(self) -> None:
        self.found: set[Listener] = set()
        # Runs of a test session share a fork server, so the run's own, and its folder, may be older than the run.
        self.before = {x for x in listeners.of_descendants(os.getpid()) if x.process != "fork server"}
        self.answers: dict[Listener, Any] = {}
        self.lost = 0
        self.files: dict[Path, os.stat_result] = {}
        opened = listeners.opened_by_descendants(os.getpid(), PUBLIC)
        self.files_before = {path for path in opened if not path.name.startswith("tm-")}

    def started(self, workers: Any, first_step: int) -> None:
        self.workers: Driver = workers

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self.found |= listeners.of_descendants(os.getpid()) - self.before
        if step == 2 and strangers.PYTHON is not None and not self.answers:
            asked = sorted(self.found)
            said = strangers.told(strangers.start(KNOCK, json.dumps([(x.kind, x.place) for x in asked])))
            self.answers = dict(zip(asked, json.loads(said)))
        self.lost = self.workers.pool.lost_total
        for path in listeners.opened_by_descendants(os.getpid(), PUBLIC) - self.files_before:
            with contextlib.suppress(FileNotFoundError):
                self.files[path] = path.lstat()


def row_of(found: Listener) -> Row:
    rows = [row for row in TABLE if row.covers(found)]
    assert rows, f"{found} is not in the table of {PAGE.name}"
    return rows[0]


def check(scan: Scan, address: str) -> None:
    assert len(scan.found) > 4 and scan.lost == 0
    assert {found.process for found in scan.found} >= {"ledger", "warehouse", "worker", "fork server"}
    check_each(scan, address)


def check_each(scan: Scan, address: str) -> None:
    for found in scan.found:
        if row_of(found).opened_with != RAYS and found.kind == "tcp":
            assert found.place.startswith((f"{address}:", "127.0.0.1:")), f"{found} can be reached from elsewhere"
    for found, answer in scan.answers.items():
        if row_of(found).opened_with == RAYS:
            continue
        if row_of(found).opened_with.startswith(OWNER):
            assert answer in ("PermissionError", "FileNotFoundError"), (found, answer)
        elif isinstance(answer, str) and answer.startswith("HTTP"):
            assert answer in ("HTTP 401", "HTTP 403", "HTTP 404"), (found, answer)
        else:
            assert isinstance(answer, int) and answer <= GREETING_BYTES, (found, answer)


def test_the_page_lists_where_a_run_listens() -> None:
    assert {row.process for row in TABLE} >= {"ledger", "warehouse", "worker", "fork server"}
    assert all(row.opened_with for row in TABLE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scan, Path]:
    """A run with an engine of two ranks, on processes, and what was seen of it."""
    scan, folder = Scan(), tmp_path_factory.mktemp("run")
    train(folder, scan, train={"steps": 3}, rollout={"tp": 2})
    return scan, folder


def test_a_run_on_processes_listens_only_where_the_page_says_and_only_here(run: tuple[Scan, Path]) -> None:
    check(run[0], "127.0.0.1")
    assert not any(row_of(found).opened_with == RAYS for found in run[0].found)


def test_a_run_keeps_in_public_folders_only_what_the_page_lists_and_to_itself(run: tuple[Scan, Path]) -> None:
    scan, folder = run
    listed = {k.replace("TMP", tempfile.gettempdir()): mode for k, mode in listeners.files(PAGE).items()}
    own = {p: seen for p, seen in scan.files.items() if p not in folder.parents}
    assert any(str(p).startswith("/dev/shm/") for p in own) and any(p.name.startswith("tm-") for p in own)
    for path, seen in own.items():
        modes = [mode for pattern, mode in listed.items() if fnmatch(str(path), pattern)]
        assert modes, f"{path} is not in the table of {PAGE.name}"
        assert stat.S_IMODE(seen.st_mode) in modes and seen.st_uid == os.geteuid(), path


def test_the_keys_that_a_run_leaves_are_in_files_of_its_user_alone(run: tuple[Scan, Path]) -> None:
    for pattern, mode in listeners.files(PAGE).items():
        if pattern.startswith("RUN/"):
            path = run[1] / "small" / pattern.removeprefix("RUN/")
            assert stat.S_IMODE(path.stat().st_mode) == mode, path
    keys = [(run[1] / "small" / "dock" / "token").read_text()]
    for file in (run[1] / "small").rglob("*"):
        if file.is_file() and "dock" not in file.relative_to(run[1]).parts:
            assert not any(key.encode() in file.read_bytes() for key in keys), f"{file} has a key in it"


@pytest.mark.slow
def test_a_learner_over_ranks_listens_only_where_the_page_says(tmp_path: Path) -> None:
    scan = Scan()
    train(tmp_path, scan, train={"steps": 3}, learn={"parallel": {"fsdp": 2}})
    check(scan, "127.0.0.1")


PROGRAM: dict[str, Any] = {
    "environment": {"program": f"{Path(__file__).with_name('agent.py')}:solve"},
    "rewards": "environment",
    "observe": {"tensorboard": False, "loggers": ["prometheus"]},
}


@pytest.mark.slow
def test_a_run_of_programs_listens_only_where_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    scan = Scan()
    train(tmp_path, scan, train={"steps": 3}, **PROGRAM)
    check(scan, "127.0.0.1")
    if scan.answers:
        assert sorted(a for a in scan.answers.values() if str(a).startswith("HTTP")) == ["HTTP 401", "HTTP 404"]


@pytest.mark.slow
def test_ranks_of_a_local_run_listen_only_where_the_page_says(tmp_path: Path) -> None:
    scan = Scan()
    train(tmp_path, scan, train={"steps": 3}, learn={"parallel": {"fsdp": 2}}, cluster={"executor": "local"})
    assert "ranks" in {found.process for found in scan.found} <= {"ranks", "driver", "fork server"}
    check_each(scan, "127.0.0.1")
    listed = {k.replace("TMP", tempfile.gettempdir()): mode for k, mode in listeners.files(PAGE).items()}
    for path, seen in scan.files.items():
        if tmp_path not in path.parents and path not in tmp_path.parents:
            assert any(fnmatch(str(path), pattern) for pattern in listed), path
            assert seen.st_uid == os.geteuid() and not stat.S_IMODE(seen.st_mode) & 0o077


@pytest.mark.parametrize(("command", "answer"), [("serve", "HTTP 403"), ("watch", "HTTP 401")])
def test_a_server_listens_only_where_the_page_says(tmp_path: Path, command: str, answer: str) -> None:
    pytest.importorskip("uvicorn")
    folder = tmp_path / "runs"
    if command == "serve":
        from tests.serve.made import model_folder

        model_folder(folder)
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "tidemill", command, str(folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and (said := server.stdout.readline()).startswith("http://127.0.0.1:")
            (found,) = listeners.of_descendants(server.pid, command)
            assert found.place == said.split("/")[2]
            assert row_of(found).opened_with
            if strangers.PYTHON is not None:
                told = strangers.told(strangers.start(KNOCK, json.dumps([(found.kind, found.place)])))
                assert json.loads(told) == [answer]
        finally:
            server.terminate()


@pytest.mark.slow
def test_a_run_on_ray_listens_only_on_the_address_that_ray_uses(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    scan = Scan()
    train(tmp_path, scan, train={"steps": 3}, cluster={"executor": "ray"}, **PROGRAM)
    check(scan, ray.util.get_node_ip_address())
