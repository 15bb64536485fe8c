"""Folders and sockets that another user could have put in place are not used; nor is what comes from another user."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.hostile import strangers
from tidemill.cluster.start import forkserver
from tidemill.device import compiled
from tidemill.errors import ConfigError, TidemillError
from tidemill.jobs.queue import Queue
from tidemill.launch.targets.ssh import claim
from tidemill.reward.sandbox.run import Sandbox, SandboxError

pytest.importorskip("msgspec")

from tidemill.dock.net.warehouse_server import _identity


@strangers.needs_root
def test_a_folder_that_another_user_made_is_no_place_for_the_fork_server(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    os.chown(place, strangers.NOBODY, strangers.NOBODY)
    with pytest.raises(TidemillError, match="not this user's alone"):
        forkserver.Forks(place / "forks").start()


def test_a_folder_that_others_may_enter_is_no_place_for_the_fork_server(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(0o755)
    with pytest.raises(TidemillError, match="not this user's alone"):
        forkserver.Forks(place / "forks").start()


@strangers.needs_root
def test_both_ends_of_the_fork_server_see_that_another_user_is_there() -> None:
    name = f"\0tidemill-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(name)
        door.listen()
        code = f"import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect({name!r}); sys.stdin.read()"
        stranger = strangers.start(code)
        theirs, _ = door.accept()
        with socket.socket(socket.AF_UNIX) as own, theirs:
            own.connect(name)
            accepted, _ = door.accept()
            with accepted:
                assert forkserver._is_own(own) and forkserver._is_own(accepted)
                assert not forkserver._is_own(theirs)
            strangers.told(stranger)


@strangers.needs_root
def test_a_warehouse_does_not_take_up_an_arena_that_another_user_put_in_its_way(tmp_path: Path) -> None:
    place = tmp_path / "tidemill-0123456789ab-node0"
    forged = tmp_path / f"{place.name}-{0:014x}"  # the first that would be found
    forged.mkdir(mode=0o700)
    os.chown(forged, strangers.NOBODY, strangers.NOBODY)
    key, arena = _identity(place)
    assert arena != forged and arena.stat().st_uid == os.geteuid()
    assert _identity(place) == (key, arena)  # its own it takes up again


def test_a_warehouse_does_not_take_up_an_arena_that_others_may_enter(tmp_path: Path) -> None:
    place = tmp_path / "tidemill-0123456789ab-node0"
    forged = tmp_path / f"{place.name}-{0:014x}"
    forged.mkdir()
    forged.chmod(0o777)
    assert _identity(place)[1] != forged


SOURCE = "int answer(void) { return %d; }"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """C code, and an empty cache to keep it in."""
    if compiled._compiler() is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TIDEMILL_KERNELS", raising=False)
    compiled._private_folder.cache_clear()
    path = tmp_path / "plain.c"
    path.write_text(SOURCE % 1)
    return path


def forge(source: Path, owner: int, mode: int) -> Path:
    """Put other code in the place of what was compiled."""
    library = compiled.library(source)
    assert library is not None and library.answer() == 1
    (made,) = (source.parent / "cache" / "tidemill").glob("*.so")
    other = source.parent / "other.c"
    other.write_text(SOURCE % 2)
    made.unlink()
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(other)], check=True)
    os.chown(made, owner, -1)
    made.chmod(mode)
    return made


@strangers.needs_root
def test_code_that_another_user_left_in_the_cache_is_not_run(source: Path) -> None:
    forge(source, strangers.NOBODY, 0o755)
    library = compiled.library(source)
    assert library is not None and library.answer() == 1


def test_code_that_everybody_may_change_is_not_run(source: Path) -> None:
    forge(source, -1, 0o777)
    library = compiled.library(source)
    assert library is not None and library.answer() == 1


@strangers.needs_root
def test_a_cache_of_another_user_holds_no_code_of_ours(source: Path) -> None:
    folder = source.parent / "cache" / "tidemill"
    folder.mkdir(parents=True)
    os.chown(folder, strangers.NOBODY, strangers.NOBODY)
    library = compiled.library(source)
    assert library is not None and library.answer() == 1 and not list(folder.iterdir())


@strangers.needs_root
def test_jobs_that_another_user_put_into_a_queue_are_not_run(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    queue.mkdir()
    (queue / "journal.jsonl").touch()
    os.chown(queue / "journal.jsonl", strangers.NOBODY, -1)
    with pytest.raises(ConfigError, match="would run as you"):
        Queue(queue)


def test_a_queue_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue").chmod(0o777)
    with pytest.raises(ConfigError, match="would run as you"):
        Queue(tmp_path / "queue")


@strangers.needs_root
def test_a_job_is_not_unpacked_where_another_user_can_change_it(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", strangers.NOBODY, -1)
    assert subprocess.run(["sh", "-c", claim(f"{tmp_path}/ours")]).returncode == 0
    refused = subprocess.run(["sh", "-c", claim(f"{tmp_path}/theirs")], capture_output=True, text=True)
    assert refused.returncode == 73 and "another user" in refused.stderr


def test_a_sandbox_leaves_no_folder_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox() as sandbox:
        try:
            first = sandbox.run("open('file', 'w').write('x')", ["open('file').read() == 'x'"])
        except SandboxError as error:
            pytest.skip(str(error))
        assert first.passed == sandbox.has_scratch and not list(tmp_path.iterdir())
        assert sandbox.run("import os", ["os.listdir('.') == []"]).passed == sandbox.has_scratch
