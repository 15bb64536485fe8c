"""What runs leave behind that were killed with all their processes is removed by the next one, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tidemill import owned
from tidemill.dock.net.process import TOKEN_FILE
from tidemill.dock.server import remove_dock
from tidemill.dock.store import arena

HOLD = "import sys; from pathlib import Path; from tidemill import owned; owned.own(Path(sys.argv[1]));"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(owned, "ORPHAN_S", -1.0)
    monkeypatch.setattr(owned, "SHARED", tmp_path / "memory")
    return owned.make()


def held_by_another(folder: Path) -> subprocess.Popen[str]:
    code = f"{HOLD} print('held', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def test_a_folder_goes_when_its_owner_was_killed_and_not_before(folder: Path) -> None:
    child = held_by_another(folder)
    (folder / "forks.log").write_text("said")
    assert owned.remove_orphans() == [] and folder.exists()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert owned.remove_orphans() == [folder] and not folder.exists()


def test_a_folder_in_memory_goes_too_and_one_that_memory_has_no_room_for_lies_on_disk(
    folder: Path, tmp_path: Path
) -> None:
    owned.SHARED.mkdir()
    assert owned.make(in_memory=1 << 60).parent == tmp_path
    made = owned.make(in_memory=1)
    assert made.parent == owned.SHARED
    os.close(owned.own(made))
    assert owned.remove_orphans() == [made] and folder.exists()


def test_a_folder_that_others_can_enter_or_that_has_no_owner_is_left_alone(folder: Path) -> None:
    assert owned.remove_orphans() == []  # nobody has locked it yet
    os.close(owned.own(folder))
    folder.chmod(0o755)
    assert owned.remove_orphans() == [] and folder.exists()


def test_a_folder_goes_with_its_process_and_not_with_a_copy_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = owned.OwnedFolder()
    child = os.fork()
    if child == 0:
        made.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert made.path.is_dir()
    made.close()
    assert not made.path.exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no shared memory here")
def test_the_shared_memory_of_a_dock_that_was_killed_goes_when_its_run_is_resumed(tmp_path: Path) -> None:
    dock = tmp_path / "dock"
    dock.mkdir()
    (dock / TOKEN_FILE).write_text("a token of this test alone")
    name = arena.dock_name("a token of this test alone")
    mine = Path("/dev/shm") / f"{name}node0-{1:014x}"
    other = Path("/dev/shm") / f"{arena.dock_name('another')}node0-{1:014x}"
    for place in (mine, other):
        place.mkdir(mode=0o700)
        (place / arena.NUMBERS).touch(0o600)
    try:
        lock = arena.claim(mine)
        assert lock is not None
        dock_again = tmp_path / "again"
        dock_again.mkdir()
        (dock_again / TOKEN_FILE).write_text("a token of this test alone")
        assert remove_dock(dock_again) == [] and mine.exists(), "a warehouse still works in it"
        os.close(lock)
        assert remove_dock(dock) == [mine] and not dock.exists() and other.exists()
    finally:
        for place in (mine, other):
            for file in place.glob("*"):
                file.unlink()
            if place.exists():
                place.rmdir()
