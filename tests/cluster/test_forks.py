"""Workers come from one process, live as long as whoever asked for them, and say how they ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.cluster.commands import HostCommands, request
from tidemill.cluster.start import forkserver as forks
from tidemill.cluster.start.forkserver import Forks
from tidemill.cluster.start.handle import WorkerLost
from tidemill.errors import TidemillError


def preload(names: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process that workers come from imports, in place of torch and all that."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import tidemill.cluster.start.forkserver as f\nf.PRELOAD = {names!r}\n")
    monkeypatch.setattr(forks, "environment", lambda: {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])})


@pytest.fixture
def light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    preload((), tmp_path / "code", monkeypatch)
    made = Forks(tmp_path / "place" / "forks")
    yield made
    made.close()


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pid_of(worker: forks.ForkedHandle) -> int:
    worker.call(request(HostCommands.stacks)).result(20)  # it is up
    return worker.pid


def test_each_worker_is_a_process_of_its_own_with_a_log_of_its_own(light: Forks, tmp_path: Path) -> None:
    workers = [light.spawn(name, tmp_path / "logs") for name in ("a", "b")]
    assert len({os.getpid(), *map(pid_of, workers)}) == 3
    assert {p.name for p in (tmp_path / "logs").glob("*.log")} == {"a.log", "b.log"}


def test_a_killed_worker_is_missed_at_once_with_the_signal_that_ended_it(light: Forks, tmp_path: Path) -> None:
    first, second = (light.spawn(name, tmp_path / "logs") for name in ("a", "b"))
    pid_of(second)
    waits = first.call(request(HostCommands.watch, 0, 60.0))
    os.kill(pid_of(first), signal.SIGKILL)
    with pytest.raises(WorkerLost, match="SIGKILL"):
        waits.result(5)
    with pytest.raises(WorkerLost):
        first.call(request(HostCommands.stacks)).result(5)
    assert second.call(request(HostCommands.stacks)).result(5).failure is None


def test_a_worker_that_hangs_ends_with_whoever_asked_for_it(light: Forks, tmp_path: Path) -> None:
    worker = light.spawn("a", tmp_path / "logs")
    pid = pid_of(worker)
    os.kill(pid, signal.SIGSTOP)
    worker._hang_up()  # as when the asker dies
    wait_until_gone(pid)


def test_two_who_know_of_one_path_use_one_process_and_another_is_started_when_it_dies(
    light: Forks, tmp_path: Path
) -> None:
    other = Forks(light.path)
    pid_of(light.spawn("a", tmp_path / "logs"))
    pid_of(other.spawn("b", tmp_path / "logs"))
    assert light._process is not None and other._process is None
    light._process.kill()
    light._process.wait()
    pid_of(other.spawn("c", tmp_path / "logs"))
    assert other._process is not None
    other.close()


def test_one_that_cannot_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preload(("no_such_module",), tmp_path / "code", monkeypatch)
    broken = Forks(tmp_path / "place" / "forks")
    with pytest.raises((WorkerLost, TidemillError), match="no_such_module"):
        broken.spawn("a", tmp_path / "logs").call(request(HostCommands.stacks)).result(20)
    broken.close()
