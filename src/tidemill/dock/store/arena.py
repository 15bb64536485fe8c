"""The arena: one warehouse's segments. They are created once, touched once, and recycled; nothing is ever zeroed again.

free ──lend──▶ lent ──writer closes, or dies──▶ closed ──nobody needs it, nobody looks──▶ free (generation + 1)
                                                  │
                                                  └──memory is short──▶ on disk, read from there by mapping
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidemill.dock.store import segment as seg
from tidemill.errors import DockError

MEBIBYTE = 1 << 20
_ARENA = re.compile(r"tidemill-[0-9a-f]{12}-.+-[0-9a-f]{14}")  # dock, node, warehouse
NUMBERS = "next"  # in the arena: the first unused segment number
CLAIM_S = 5.0  # a process that was told to end may take this long
ORPHAN_S = 3600.0  # an arena without a warehouse is kept this long, for the next warehouse of the same dock to adopt
LOCK_GRACE_S = 2.0  # a writer has this long from being lent a segment to holding its lock


@dataclass(slots=True)
class Segment:
    number: int
    nbytes: int
    generation: int
    state: Literal["free", "lent", "closed", "spilling"]
    fd: int
    since: float = 0.0
    is_spilled: bool = False
    maybe_empty: bool = False  # nobody needs it, as far as the ledger knows


class Arena:
    def __init__(
        self, folder: Path, spill_folder: Path, memory_bytes: int, segment_bytes: int, numbers: int | None = None
    ) -> None:
        """`numbers` is the result of `claim`: existing segments may be adopted only once nobody else works in the
        folder."""
        self.folder = folder
        self.memory_bytes, self.segment_bytes = memory_bytes, segment_bytes
        self.segments: dict[int, Segment] = {}
        self.recycled = self.spilled = self.failed_spills = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        spill_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        link = folder / "spill"
        if not link.is_symlink():
            link.symlink_to(spill_folder.resolve())
        self._numbers = _open_numbers(folder) if numbers is None else numbers
        self._adopt()
        self.next_number = max(max(self.segments, default=-1) + 1, _read_number(self._numbers))

    def touch(self) -> None:
        """Mark the arena as in use: if we are killed, it is spared for `ORPHAN_S` from now on."""
        os.utime(self._numbers)

    @property
    def used_bytes(self) -> int:
        """Return the memory of all segments, free ones included."""
        return sum(s.nbytes for s in self.segments.values() if not s.is_spilled)

    @property
    def busy_bytes(self) -> int:
        return sum(s.nbytes for s in self.segments.values() if s.state != "free" and not s.is_spilled)

    @property
    def spilled_bytes(self) -> int:
        return sum(s.nbytes for s in self.segments.values() if s.is_spilled)

    def check_fits(self, nbytes: int) -> None:
        """Refuse what could never be stored: waiting would not help, and trying would fill the machine."""
        if not 0 <= nbytes <= self.memory_bytes:
            raise DockError(
                f"a chunk of {nbytes:,} bytes does not fit a warehouse of {self.memory_bytes:,}",
                "put fewer rows at once, or raise memory_bytes",
            )

    def lend(self, nbytes: int) -> Segment | None:
        """Lend a segment with room to one writer; None while memory is short."""
        size = max(self.segment_bytes, -(-nbytes // MEBIBYTE) * MEBIBYTE)
        fitting = [s for s in self.segments.values() if s.state == "free" and size <= s.nbytes <= 2 * size]
        chosen = min(fitting, key=lambda s: (s.nbytes, s.number)) if fitting else self._make(size)
        if chosen is not None:
            chosen.state, chosen.since, chosen.maybe_empty = "lent", time.monotonic(), False
        return chosen

    def prepare(self, count: int) -> None:
        """Create segments ahead of need."""
        for _ in range(count):
            if self.used_bytes + self.segment_bytes > self.memory_bytes or self._make(self.segment_bytes) is None:
                return

    def close(self, number: int, generation: int) -> None:
        segment = self.segments.get(number)
        if segment is not None and segment.generation == generation and segment.state == "lent":
            segment.state, segment.maybe_empty = "closed", True

    def note_empty(self, number: int, generation: int) -> None:
        segment = self.segments.get(number)
        if segment is not None and segment.generation == generation:
            segment.maybe_empty = True

    def doubt_all(self) -> None:
        """Ask a restarted ledger again which segments are empty."""
        for segment in self.segments.values():
            segment.maybe_empty = segment.state != "free"

    def close_orphans(self, now: float) -> None:
        """Close segments whose writer died, which released its lock."""
        for segment in self.segments.values():
            if segment.state == "lent" and now - segment.since > LOCK_GRACE_S and seg.try_lock_alone(segment.fd):
                seg.unlock(segment.fd)
                segment.state, segment.maybe_empty = "closed", True

    def retirable(self) -> dict[int, int]:
        """Return closed segments that may be empty: the ledger is asked about each once per hint."""
        asked = [s for s in self.segments.values() if s.state == "closed" and s.maybe_empty]
        for segment in asked:
            segment.maybe_empty = False
        return {s.number: s.generation for s in asked}

    def recycle(self, number: int) -> bool:
        """Free a segment that the ledger retired. False while somebody still reads it."""
        segment = self.segments[number]
        if segment.state != "closed" or not seg.try_lock_alone(segment.fd):
            return False
        if segment.is_spilled and not self._bring_back(segment):
            self._remove(segment)
            self.recycled += 1
            return True
        segment.generation += 1
        seg.write_header(segment.fd, seg.Header(segment.generation, seg.IN_MEMORY, segment.nbytes))
        seg.unlock(segment.fd)
        segment.state, segment.maybe_empty = "free", False
        self.recycled += 1
        return True

    # -- spilling ----------------------------------------------------------------------------------------------------

    def spillable(self) -> Segment | None:
        """Return the segment that has been closed longest and that nobody reads; locked, until `finish_spill`."""
        closed = [s for s in self.segments.values() if s.state == "closed" and not s.is_spilled]
        for segment in sorted(closed, key=lambda s: s.since):
            if seg.try_lock_alone(segment.fd):
                segment.state = "spilling"
                return segment
        return None

    def copy_out(self, segment: Segment) -> None:
        """Write a segment to disk: slow, for a thread of its own. Readers wait for the lock meanwhile."""
        path = seg.spill_path_of(self.folder, segment.number)
        with open(seg.path_of(self.folder, segment.number), "rb") as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target, MEBIBYTE)

    def finish_spill(self, segment: Segment) -> None:
        seg.write_header(segment.fd, seg.Header(segment.generation, seg.SPILLED, segment.nbytes))
        _free_pages(segment.fd, segment.nbytes)
        segment.is_spilled, segment.state = True, "closed"
        self.spilled += 1
        seg.unlock(segment.fd)

    def give_up_spill(self, segment: Segment) -> None:
        """Keep a segment in memory that the disk did not take, and let readers in."""
        seg.spill_path_of(self.folder, segment.number).unlink(missing_ok=True)
        segment.state, segment.since = "closed", time.monotonic()  # the last to be tried again
        self.failed_spills += 1
        seg.unlock(segment.fd)

    def _bring_back(self, segment: Segment) -> bool:
        """Give memory to a segment whose bytes on disk nobody needs; False when there is none."""
        if self.used_bytes + segment.nbytes > self.memory_bytes:
            return False
        try:
            os.posix_fallocate(segment.fd, 0, seg.HEADER_BYTES + segment.nbytes)
        except OSError:  # others have filled the shared memory
            return False
        seg.spill_path_of(self.folder, segment.number).unlink(missing_ok=True)
        segment.is_spilled = False
        return True

    # -- making ------------------------------------------------------------------------------------------------------

    def _make(self, nbytes: int) -> Segment | None:
        for other in [s for s in self.segments.values() if s.state == "free" and not s.is_spilled]:
            if self.used_bytes + nbytes <= self.memory_bytes:
                break
            self._destroy(other)
        if self.used_bytes + nbytes > self.memory_bytes:
            return None
        number = self.next_number
        self.next_number += 1
        # a successor must not reuse the number: readers may have the file open long after it is destroyed
        os.pwrite(self._numbers, self.next_number.to_bytes(8, "little"), 0)
        try:
            seg.create(self.folder, number, nbytes)
        except FileExistsError:  # not ours to remove: its bytes may be needed
            return None
        except OSError:  # the file system is smaller than it said, or others filled it
            seg.path_of(self.folder, number).unlink(missing_ok=True)
            return None
        fd = os.open(seg.path_of(self.folder, number), os.O_RDWR)
        segment = self.segments[number] = Segment(number, nbytes, 0, "free", fd)
        return segment

    def _destroy(self, segment: Segment) -> None:
        if seg.try_lock_alone(segment.fd):
            self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        del self.segments[segment.number]
        os.close(segment.fd)
        for path_of in (seg.path_of, seg.spill_path_of):
            path_of(self.folder, segment.number).unlink(missing_ok=True)

    def _adopt(self) -> None:
        """Adopt what a predecessor left: its bytes are valid, and the ledger knows whether they are needed."""
        for path in self.folder.glob("s[0-9]*"):
            fd = os.open(path, os.O_RDWR)
            try:
                header = seg.read_header(fd)
            except seg.SegmentGone:  # the predecessor died while creating it
                os.close(fd)
                path.unlink()
                continue
            number = int(path.name[1:])
            if header.where == seg.SPILLED:  # the predecessor may have been killed before it freed them
                _free_pages(fd, header.nbytes)
            self.segments[number] = Segment(
                number, header.nbytes, header.generation, "lent", fd, -1e9, header.where == seg.SPILLED, True
            )

    def destroy(self) -> None:
        for segment in self.segments.values():
            os.close(segment.fd)
        self.segments.clear()
        spill = (self.folder / "spill").resolve()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(spill, ignore_errors=True)
        os.close(self._numbers)  # last, so that a process waiting to claim the folder finds it gone


def _free_pages(fd: int, nbytes: int) -> None:
    """Free a segment's body, which exists elsewhere, too."""
    size = seg.HEADER_BYTES + nbytes
    with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        mapping.madvise(mmap.MADV_REMOVE, seg.HEADER_BYTES, nbytes)


def claim(folder: Path, within_s: float = CLAIM_S) -> int | None:
    """Claim the folder, exclusively while the returned file is open. None when it is gone: the process that held it
    has removed it."""
    try:
        numbers = _open_numbers(folder)
    except FileNotFoundError:
        return None
    deadline = time.monotonic() + within_s
    while not seg.try_lock_alone(numbers):
        if time.monotonic() > deadline:
            os.close(numbers)
            raise DockError(f"another warehouse works in {folder}", "end it, or give the node another name")
        time.sleep(0.02)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.stat(folder / NUMBERS), os.fstat(numbers)):
            return numbers
    os.close(numbers)
    return None


def _open_numbers(folder: Path) -> int:
    return os.open(folder / NUMBERS, os.O_CREAT | os.O_RDWR, 0o600)


def _read_number(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 8, 0), "little")


def spill_name(key: int) -> str:
    """Name the folder on disk that a warehouse's segments spill to."""
    return f"spill-{key}"


def is_own_folder(folder: Path) -> bool:
    """Say whether it is a folder that only this user can enter."""
    seen = folder.lstat()
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid() and not stat.S_IMODE(seen.st_mode) & 0o077


def dock_name(token: str) -> str:
    """Name the arenas of one dock, without revealing its token."""
    return f"tidemill-{hashlib.blake2b(token.encode(), digest_size=6).hexdigest()}-"


def remove_orphans(place: Path, dock: str = "tidemill-", older_than_s: float = ORPHAN_S) -> list[Path]:
    """Remove arenas whose warehouse was killed with everything that would have restarted it: nobody else would free
    the memory."""
    removed = []
    for folder in place.glob(f"{dock}*"):
        try:
            if not _ARENA.fullmatch(folder.name) or not is_own_folder(folder):
                continue
            fd = os.open(folder / NUMBERS, os.O_RDWR)
        except OSError:  # it is being removed, or is not an arena
            continue
        try:
            if time.time() - os.fstat(fd).st_mtime > older_than_s and seg.try_lock_alone(fd):
                spill = Path(os.path.realpath(folder / "spill"))
                shutil.rmtree(folder, ignore_errors=True)
                if spill.name == spill_name(int(folder.name[-14:], 16)):
                    shutil.rmtree(spill, ignore_errors=True)
                removed.append(folder)
        finally:
            os.close(fd)
    return removed


def choose_place(name: str, fallback: Path, memory_bytes: int | None, segment_bytes: int) -> tuple[Path, int, bool]:
    """Return (folder, bytes, whether it is real shared memory). Where /dev/shm is missing or too small, a folder on
    disk serves, mapped like memory but written back by the kernel."""
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free if shared.is_dir() and os.access(shared, os.W_OK) else 0
    wanted = memory_bytes if memory_bytes is not None else room // 2
    if room >= max(wanted, 4 * segment_bytes):
        return shared / name, wanted, True
    return fallback / "arena", memory_bytes or shutil.disk_usage(fallback).free // 2, False
