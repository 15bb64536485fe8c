"""Segments: files in shared memory that processes of one node map, with a guard against looking at recycled bytes.

A segment has a one-page header (generation, where the bytes are) and a body. Whoever looks at a body holds a shared
`flock` on the file, which the kernel lets go if the process dies; only with the exclusive lock is a segment recycled,
and recycling raises its generation. So: lock, then compare the generation, and the bytes cannot change while looked at.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.errors import DockError

Bytes = npt.NDArray[np.uint8]

HEADER_BYTES = 4096
MAGIC = 0x54494445_4D494C4C
IN_MEMORY, SPILLED = 0, 1
_HEADER = struct.Struct("<QQQQ")  # magic, generation, where, body bytes


class SegmentGone(DockError):
    """The bytes asked for are not there any more: the segment was recycled or went with its warehouse."""


@dataclass(frozen=True, slots=True)
class Header:
    generation: int
    where: int
    nbytes: int


def path_of(arena: Path, number: int) -> Path:
    return arena / f"s{number}"


def spill_path_of(arena: Path, number: int) -> Path:
    """Beside the arena there is a link to the folder that segments spill to."""
    return arena / "spill" / f"s{number}"


def create(arena: Path, number: int, nbytes: int) -> None:
    """Make a segment and touch its pages: the first touch costs seven times a copy, and nobody should wait for it."""
    fd = os.open(path_of(arena, number), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, HEADER_BYTES + nbytes)
        write_header(fd, Header(0, IN_MEMORY, nbytes))
    finally:
        os.close(fd)


def read_header(fd: int) -> Header:
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size:
        raise SegmentGone("a segment file is shorter than its header")
    return _parse(raw)


def _parse(raw: bytes | mmap.mmap) -> Header:
    magic, generation, where, nbytes = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise SegmentGone("a segment file does not start as segments do")
    return Header(generation, where, nbytes)


def write_header(fd: int, header: Header) -> None:
    os.pwrite(fd, _HEADER.pack(MAGIC, header.generation, header.where, header.nbytes), 0)


def try_lock_alone(fd: int) -> bool:
    """The exclusive lock, if nobody looks at the segment or writes to it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


class Mapped:
    """One segment as this process sees it: its file, its mapping, and how many views are out."""

    def __init__(self, arena: Path, number: int) -> None:
        self._arena, self._number = arena, number
        try:
            self.fd = os.open(path_of(arena, number), os.O_RDWR)
        except FileNotFoundError:
            raise SegmentGone(f"segment {number} is gone with its warehouse") from None
        self.users = 0
        self.lock = threading.RLock()
        self.is_locked = False  # the file, by this process
        try:  # a page of its own: looked at without a system call
            self._header = mmap.mmap(self.fd, HEADER_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except ValueError:  # shorter than that: its warehouse died while making it
            os.close(self.fd)
            raise SegmentGone(f"segment {number} is shorter than its header") from None
        self._maps: dict[tuple[int, bool], mmap.mmap] = {}

    def header(self) -> Header:
        return _parse(self._header)

    def map(self, header: Header, writable: bool) -> mmap.mmap:
        """Kept for the life of the process while the bytes stay where they are: page tables are costly too."""
        key = (header.where, writable)
        if key not in self._maps:
            size = HEADER_BYTES + header.nbytes
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            if header.where == IN_MEMORY:
                # A writer fills it at once: one batch of page-table entries instead of a fault per page.
                flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if writable else 0)
                self._maps[key] = mmap.mmap(self.fd, size, flags, prot)
            else:
                fd = os.open(spill_path_of(self._arena, self._number), os.O_RDONLY)
                try:
                    self._maps[key] = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
                finally:
                    os.close(fd)
        return self._maps[key]

    def is_unlinked(self) -> bool:
        return os.fstat(self.fd).st_nlink == 0

    def forget_spilled(self) -> None:
        self._maps.pop((SPILLED, False), None)

    def close(self) -> None:
        self._maps = {}  # mappings with views out live on until those go
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SegmentRoot(np.ndarray[Any, np.dtype[np.uint8]]):
    """The array that all views of a chunk rest on; with it goes the hold on the segment. (weakref.finalize would do the
    same in ten times the time.)"""

    views: Views | None = None  # only the first has it: slices of it are of this type too, and hold it as their base
    segment: Mapped | None = None

    def __del__(self) -> None:
        if self.views is not None and self.segment is not None and not sys.is_finalizing():
            self.views._let_go(self.segment)


class Views:
    """All segments this process looks at or writes to. Thread-safe; finalisers may call in at any point."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._mapped: dict[tuple[Path, int], Mapped] = {}
        _OPEN.add(self)

    def read(self, arena: Path, number: int, generation: int, offset: int, nbytes: int) -> Bytes:
        """Bytes of a chunk as a read-only array. The segment stays as it is until the array and all views of it go."""
        segment, header = self._hold(arena, number, generation)
        try:
            if offset < 0 or nbytes < 0 or offset + nbytes > header.nbytes:
                raise SegmentGone(f"bytes {offset} to {offset + nbytes} are outside of segment {number}")
            root = SegmentRoot((nbytes,), np.uint8, segment.map(header, False), HEADER_BYTES + offset)
        except BaseException:
            self._let_go(segment)
            raise
        root.views, root.segment = self, segment
        return root

    def hold_for_writing(self, arena: Path, number: int, generation: int) -> tuple[Mapped, Bytes]:
        """The whole body, writable; call `release` when done with it."""
        segment, header = self._hold(arena, number, generation)
        body = np.frombuffer(segment.map(header, True), np.uint8, header.nbytes, HEADER_BYTES)
        return segment, body

    def release(self, segment: Mapped) -> None:
        self._let_go(segment)

    def forget(self, arena: Path) -> None:
        """A warehouse is gone: close its files. Views that are out stay valid, the kernel keeps their pages."""
        with self._lock:
            for key in [key for key in self._mapped if key[0] == arena]:
                segment = self._mapped[key]
                if segment.users == 0:
                    self._mapped.pop(key).close()

    def close(self) -> None:
        with self._lock:
            for segment in self._mapped.values():
                segment.close()
            self._mapped.clear()

    def _hold(self, arena: Path, number: int, generation: int) -> tuple[Mapped, Header]:
        with self._lock:
            key = (arena, number)
            segment = self._mapped.get(key)
            if segment is None:
                self._forget_destroyed()
                segment = self._mapped[key] = Mapped(arena, number)
            # Counted before it is locked: a view that the collector ends here and now must not unlock it.
            segment.users += 1
        # Under the segment's own lock: while it is spilled this waits, and must keep nobody from another segment.
        with segment.lock:
            if not segment.is_locked:
                fcntl.flock(segment.fd, fcntl.LOCK_SH)
                segment.is_locked = True
            header = segment.header()
        if header.generation == generation:
            return segment, header
        self._let_go(segment)
        raise SegmentGone(f"segment {number} has been recycled (generation {header.generation}, not {generation})")

    def _forget_destroyed(self) -> None:
        """Segments that their warehouse has unlinked: our mapping would keep their memory for ever."""
        for key in [key for key, segment in self._mapped.items() if not segment.users and segment.is_unlinked()]:
            self._mapped.pop(key).close()

    def _let_go(self, segment: Mapped) -> None:
        with self._lock:
            segment.users -= 1
            if segment.users == 0 and segment.fd >= 0:
                with segment.lock:  # never waited for: who waits for the file under it is a user
                    segment.forget_spilled()
                    if segment.is_locked:
                        unlock(segment.fd)
                        segment.is_locked = False


_OPEN: weakref.WeakSet[Views] = weakref.WeakSet()


def _after_fork() -> None:
    """A child shares its parent's locks: it must not keep them alive after the parent has gone."""
    for views in list(_OPEN):
        views.close()


os.register_at_fork(after_in_child=_after_fork)
