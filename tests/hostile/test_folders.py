"""Folders and sockets that another user could have put in place are not used; nor is what comes from another user."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.hostile import strangers
from tidemill.cluster.start import forkserver
from tidemill.errors import TidemillError

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
