"""Temporary folders that do not outlive their owner for long: the next run removes those whose owner is dead. Each
owner holds a shared lock in its folder for as long as it lives, however it ends. Names are random, and a folder is
checked before it is touched: it must be this user's alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path

PREFIX = "tm-"  # short: sockets lie in these folders, and a socket's path is limited
LOCK = "owner"
SHARED = Path("/dev/shm")
ORPHAN_S = 60.0  # a younger folder may not be locked by its owner yet


def make(in_memory: int = 0) -> Path:
    """Make a new folder for this user alone, without an owner yet. `in_memory`: bytes that should lie in memory, where
    the system has room for them."""
    remove_orphans()
    is_shared = in_memory and _has_memory() and shutil.disk_usage(SHARED).free > in_memory
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED if is_shared else None))


def own(folder: Path) -> int:
    """Become one of the folder's owners, until the returned file is closed or this process ends."""
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


class OwnedFolder:
    """A new folder of this process, until it is closed, forgotten, or the process ends."""

    def __init__(self, in_memory: int = 0) -> None:
        self.path = make(in_memory)
        self._end = weakref.finalize(self, _remove, self.path, own(self.path), os.getpid())

    def close(self) -> None:
        self._end()


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # and not a copy of it
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_orphans() -> list[Path]:
    """Remove this user's folders whose owners are dead, and return them."""
    removed = []
    places = [Path(tempfile.gettempdir()), *([SHARED] if _has_memory() else [])]
    for folder in (folder for place in places for folder in place.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # it is being removed, or an owner lives
            if not _is_old_and_ours(folder.lstat()):
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
            finally:
                os.close(lock)
    return removed


def _has_memory() -> bool:
    return SHARED.is_dir() and os.access(SHARED, os.W_OK)


def _is_old_and_ours(seen: os.stat_result) -> bool:
    is_ours = stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid() and not stat.S_IMODE(seen.st_mode) & 0o077
    return is_ours and time.time() - seen.st_ctime > ORPHAN_S
