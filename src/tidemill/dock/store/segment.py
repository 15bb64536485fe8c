"""Segments: files in shared memory that processes of one node map, with a guard against reading recycled bytes. A
segment has a one-page header (generation, where the bytes are) and a body. A reader of the body holds a shared `flock`
on the file, which the kernel releases if the process dies; a segment is recycled only under the exclusive lock, and
recycling raises its generation. So a reader locks, then compares the generation, and the bytes cannot change while it
reads."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
import threading
import weakref
from contextlib import suppress
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
MADV_POPULATE_WRITE = 23  # Python has no name for it
_HEADER = struct.Struct("<QQQQ")  # magic, generation, where, body bytes


class SegmentGone(DockError):
    """The bytes are gone: the segment was recycled, or lost with its warehouse."""


@dataclass(frozen=True, slots=True)
class Header:
    generation: int
    where: int
    nbytes: int


def path_of(arena: Path, number: int) -> Path:
    return arena / f"s{number}"


def spill_path_of(arena: Path, number: int) -> Path:
    """Return the file that a segment spills to, through a link beside the arena."""
    return arena / "spill" / f"s{number}"


def create(arena: Path, number: int, nbytes: int) -> None:
    """Create a segment and touch its pages: the first touch costs seven times a copy, and nobody should wait for it."""
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
    """Take the exclusive lock, if nobody reads or writes the segment."""
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
        try:  # a page of its own, read without a system call
            self._header = mmap.mmap(self.fd, HEADER_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except ValueError:  # shorter than that: its warehouse died while creating it
            os.close(self.fd)
            raise SegmentGone(f"segment {number} is shorter than its header") from None
        self._maps: dict[tuple[int, bool], mmap.mmap] = {}
        self._is_populated = False

    def header(self) -> Header:
        return _parse(self._header)

    def map(self, header: Header, writable: bool) -> mmap.mmap:
        """Map the body. The mapping is kept while the bytes stay where they are, because page tables are costly,
        too."""
        key = (header.where, writable)
        if key not in self._maps:
            size = HEADER_BYTES + header.nbytes
            if header.where == IN_MEMORY:
                self._map_memory(size)
            else:
                fd = os.open(spill_path_of(self._arena, self._number), os.O_RDONLY)
                try:
                    self._maps[key] = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
                finally:
                    os.close(fd)
        if writable and not self._is_populated:
            self._populate(self._maps[key])
        return self._maps[key]

    def _map_memory(self, size: int) -> None:
        """Map for reading and for writing at once: each mapping holds a descriptor, and a process that first writes
        to a segment after hours would otherwise seem to lose one."""
        for writable in (False, True):
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._maps[IN_MEMORY, writable] = mmap.mmap(self.fd, size, mmap.MAP_SHARED, prot)

    def _populate(self, mapped: mmap.mmap) -> None:
        """A writer fills it at once: one batch of page-table entries instead of a fault per page."""
        self._is_populated = True
        with suppress(OSError):  # before Linux 5.14: pages come as they are touched
            mapped.madvise(MADV_POPULATE_WRITE)

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
    """The base array of all views of a chunk; deleting it releases the segment. (weakref.finalize would take ten
    times as long.)"""

    views: Views | None = None  # only the first has it: slices are of this type, too, and hold it as their base
    segment: Mapped | None = None

    def __del__(self) -> None:
        if self.views is not None and self.segment is not None and not sys.is_finalizing():
            self.views._let_go(self.segment)


class Views:
    """All segments that this process reads or writes. Thread-safe; finalisers may call it at any point."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._mapped: dict[tuple[Path, int], Mapped] = {}
        _OPEN.add(self)

    def read(self, arena: Path, number: int, generation: int, offset: int, nbytes: int) -> Bytes:
        """Return a chunk's bytes as a read-only array. The segment does not change until the array and all views of
        it are gone."""
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
        """Close the files of a warehouse that is gone. Existing views stay valid, because the kernel keeps their
        pages."""
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
            # counted before it is locked: a view that is collected right now must not unlock it
            segment.users += 1
        # under the segment's own lock: this waits while it is spilled, and must not block other segments
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
        """Unmap segments that their warehouse has unlinked, whose memory our mapping would keep for ever."""
        for key in [key for key, segment in self._mapped.items() if not segment.users and segment.is_unlinked()]:
            self._mapped.pop(key).close()

    def _let_go(self, segment: Mapped) -> None:
        with self._lock:
            segment.users -= 1
            if segment.users == 0 and segment.fd >= 0:
                with segment.lock:  # never waited for: a thread that waits for the file under it is a reader
                    segment.forget_spilled()
                    if segment.is_locked:
                        unlock(segment.fd)
                        segment.is_locked = False


_OPEN: weakref.WeakSet[Views] = weakref.WeakSet()


def _after_fork() -> None:
    """Close everything in a forked child, which shares its parent's locks and must not keep them alive."""
    for views in list(_OPEN):
        views.close()


os.register_at_fork(after_in_child=_after_fork)
