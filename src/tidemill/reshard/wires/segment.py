"""Segments: named shared memory that ranks of one user open by a secret, and that no other user can forge or read.

A name is a keyed hash of the secret, so nobody else can tell it beforehand or learn the secret from it. A segment is
created anew or not at all, for this user alone; who opens one looks at its owner, its mode and a seal inside that only
holders of the secret can make. The name is gone as soon as all ranks have it open. What a rank that was killed before
that left behind is removed by the next one that opens a wire.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import mmap
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tidemill.errors import ReshardError

SEAL_BYTES = 4096
NAME = re.compile(r"tidemill-ring-[0-9a-f]{32}")
ORPHAN_S = 60.0  # a name that old, whose maker is gone, is nobody's
_LENGTH = struct.Struct("<I")
_PROOF_BYTES = 32


@contextlib.contextmanager
def created(token: str, rank: int, size: int) -> Iterator[mmap.mmap]:
    """A new segment. Inside, others can open it; afterwards those that did still have it, and no name is left."""
    path = _path(token, rank)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ReshardError(f"{path} exists: another wire has this token", "use a fresh token for each wire") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # held for as long as the name is wanted
        os.truncate(descriptor, size)
        yield mmap.mmap(descriptor, size)
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def attached(token: str, rank: int, size: int, deadline: float) -> mmap.mmap:
    """Another rank's segment; waits for it."""
    path = _path(token, rank)
    while True:
        with contextlib.suppress(FileNotFoundError):
            _check_owner(path, path.lstat())  # of a link itself; what is opened is looked at again
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _check_owner(path, os.fstat(descriptor))
                if os.fstat(descriptor).st_size == size:
                    return mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        if time.monotonic() > deadline:
            raise ReshardError(
                f"rank {rank} did not come to its shared memory in time", "start all ranks with the same token"
            )
        time.sleep(0.002)


def seal(mapped: mmap.mmap, at: int, token: str, rank: int, message: bytes) -> None:
    """Write a short message that others can tell from anybody else's."""
    if len(message) > SEAL_BYTES - _PROOF_BYTES - _LENGTH.size:
        raise ReshardError(f"a message of {len(message)} bytes does not fit into a segment")
    mapped[at : at + SEAL_BYTES] = (_proof(token, rank, message) + _LENGTH.pack(len(message)) + message).ljust(
        SEAL_BYTES, b"\0"
    )


def unsealed(mapped: mmap.mmap, at: int, token: str, rank: int) -> bytes:
    """The message of a rank that has the token."""
    sealed = mapped[at : at + SEAL_BYTES]
    (length,) = _LENGTH.unpack_from(sealed, _PROOF_BYTES)
    start = _PROOF_BYTES + _LENGTH.size
    message = sealed[start : start + length]
    if not hmac.compare_digest(sealed[:_PROOF_BYTES], _proof(token, rank, message)):
        raise ReshardError(f"the shared memory of rank {rank} was not made by a rank of this link")
    return message


def remove_orphans() -> list[Path]:
    """Segments of this user whose makers were killed before all ranks had them open."""
    removed = []
    for path in _folder().glob("tidemill-ring-*"):
        if not NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # going, or not ours
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                seen = os.fstat(descriptor)
                if seen.st_uid == os.geteuid() and time.time() - seen.st_ctime > ORPHAN_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else its maker lives
                    path.unlink()
                    removed.append(path)
            finally:
                os.close(descriptor)
    return removed


def _check_owner(path: Path, seen: os.stat_result) -> None:
    if seen.st_uid != os.geteuid() or not stat.S_ISREG(seen.st_mode) or stat.S_IMODE(seen.st_mode) & 0o077:
        raise ReshardError(
            f"{path} is not this user's alone (owner {seen.st_uid}, mode {stat.filemode(seen.st_mode)})",
            "another user may have put it there: remove it, and look who that is",
        )


def _folder() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def _path(token: str, rank: int) -> Path:
    return _folder() / f"tidemill-ring-{_keyed(token, f'name {rank}'.encode())[:16].hex()}"


def _proof(token: str, rank: int, message: bytes) -> bytes:
    return _keyed(token, f"seal {rank} ".encode() + message)


def _keyed(token: str, message: bytes) -> bytes:
    return hmac.digest(token.encode(), message, hashlib.sha256)
