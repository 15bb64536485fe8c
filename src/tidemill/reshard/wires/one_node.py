"""A wire for ranks of one node: each lays its blocks out once in memory that all of them see.

Every rank owns a ring; whoever wants a block copies it from there, so bytes that several ranks want are packed once and
travel through no socket. The ring lies where the tensors lie: in shared host memory, or on the device, opened by the
others through the vendor's inter-process handles. `segment` says who can open it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tidemill.errors import ReshardError
from tidemill.reshard.move import (
    BUCKET_BYTES,
    CHECK_EVERY,
    DEPTH,
    REBUILD,
    TIMEOUT_S,
    Checks,
    Job,
    Moved,
    confirm,
    copy_local,
    lay,
    own_copies,
    unpack,
)
from tidemill.reshard.plan import Plan
from tidemill.reshard.schedule import Page, pages
from tidemill.reshard.wires import segment
from tidemill.reshard.wires.handle import DeviceHandle

Board = npt.NDArray[np.int64]
POLL_S = 0.0002
LOOK_S = 0.05  # how often a waiting rank looks whether the other still lives
READY, PROCESS, FILLED, BROKEN, ROUND, WELL = range(6)  # words of a rank's board; then one per reader: pages taken


class SharedWire:
    """Rings of `ranks` ranks of one node that know one another by `token`, a secret that no other wire uses."""

    def __init__(
        self,
        token: str,
        rank: int,
        ranks: int,
        *,
        depth: int = DEPTH,
        bucket_bytes: int = BUCKET_BYTES,
        device: torch.device | str = "cpu",
        timeout_s: float = TIMEOUT_S,
        tamper: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.rank, self.ranks, self.depth = rank, ranks, depth
        self.bucket_bytes = max(256, bucket_bytes // 64 * 64)
        self.nbytes = depth * self.bucket_bytes
        self.timeout_s = timeout_s
        self._device = torch.device(device)
        self._tamper = tamper  # tests flip bits of a page before it is read
        self._base = [0] * ranks  # pages that each rank filled in earlier transfers
        self._agreed = 0
        self._pages: dict[tuple[int, int, int], tuple[Plan, dict[int, list[Page]]]] = {}
        self._boards: list[Board] = []
        self._rings: list[torch.Tensor] = []
        self._open(token)

    def carry(self, job: Job, moved: Moved) -> None:
        laid = self._layout(job)
        mine, checks, copies = laid.get(self.rank, []), Checks(), own_copies(job)
        moved.rounds = max(map(len, laid.values()), default=0)
        if not self.agree(True, job.version):
            raise ReshardError(f"ranks do not agree to move version {job.version}", REBUILD)
        for turn in range(moved.rounds + self.depth - 1):
            if turn < len(mine):
                self._fill(turn, mine, job, moved)
            if copies:
                copy_local(copies.popleft(), job, moved, self.bucket_bytes // 2)
            if turn >= self.depth - 1:
                self._take(turn - self.depth + 1, laid, job, moved, checks)
        while copies:
            copy_local(copies.popleft(), job, moved, self.bucket_bytes // 2)
        for rank, filled in laid.items():
            self._base[rank] += len(filled)
        confirm(self, job, moved, checks)

    def agree(self, ok: bool, version: int) -> bool:
        """All ranks show a word and wait for the others': the version, or none."""
        board = self._boards[self.rank]
        self._agreed += 1
        board[WELL + self._agreed % 2] = version if ok else -1
        _fence()
        board[ROUND] = self._agreed
        for rank, other in enumerate(self._boards):
            self._wait(rank, other, ROUND, self._agreed, "agree")
        _fence()
        words = {int(other[WELL + self._agreed % 2]) for other in self._boards}
        return words == {version}

    def close(self) -> None:
        """Tell the others, and let the memory go."""
        if self._boards:
            self._boards[self.rank][BROKEN] = 1
        self._boards, self._rings = [], []

    # One page

    def _fill(self, turn: int, mine: list[Page], job: Job, moved: Moved) -> None:
        board, base = self._boards[self.rank], self._base[self.rank]
        if turn >= self.depth:
            for reader in mine[turn - self.depth].readers:
                self._wait(reader, board, _taken(reader), base + turn - self.depth + 1, "read")
        ring = self._page(self.rank, turn)
        for slot, _ in mine[turn].blocks:
            lay(slot.transfer, job, ring, slot.at, slot.check_at)
        moved.sent_bytes += mine[turn].nbytes
        self._synchronize()
        _fence()
        board[FILLED] = base + turn + 1

    def _take(self, turn: int, laid: dict[int, list[Page]], job: Job, moved: Moved, checks: Checks) -> None:
        # Begin with the next rank, so that not all read the same ring at once.
        for sender in ((self.rank + i) % self.ranks for i in range(1, self.ranks)):
            if turn >= len(laid.get(sender, ())) or self.rank not in laid[sender][turn].readers:
                continue
            board, base = self._boards[sender], self._base[sender]
            self._wait(sender, board, FILLED, base + turn + 1, "write")
            _fence()
            ring = self._page(sender, turn)
            if self._tamper:
                self._tamper(ring)
            for slot, readers in laid[sender][turn].blocks:
                if self.rank in readers:
                    unpack(readers[self.rank], job.targets, ring, slot.at, slot.check_at, checks)
                    moved.received_bytes += slot.transfer.nbytes
            self._synchronize()
            _fence()
            board[_taken(self.rank)] = base + turn + 1

    def _page(self, rank: int, turn: int) -> torch.Tensor:
        at = (self._base[rank] + turn) % self.depth * self.bucket_bytes
        return self._rings[rank].narrow(0, at, self.bucket_bytes)

    def _layout(self, job: Job) -> dict[int, list[Page]]:
        if any(t.hop for t in job.plan.transfers):
            raise ReshardError("a shared wire needs a direct plan", "make it with plan(…, direct=True)")
        every = CHECK_EVERY[job.verify]
        key = (id(job.plan), every, job.version % max(1, every))
        if key not in self._pages:
            made = pages(job.plan, page_bytes=self.bucket_bytes, check_every=every, version=key[2])
            self._pages[key] = job.plan, made
        return self._pages[key][1]

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    # Waiting

    def _wait(self, rank: int, board: Board, word: int, value: int, what: str) -> None:
        """Until a word on a board has grown to `value`; `rank` is whose doing that is."""
        deadline = time.monotonic() + self.timeout_s
        look = time.monotonic() + LOOK_S
        while board[word] < value:
            time.sleep(POLL_S)
            now = time.monotonic()
            if now < look:
                continue
            look = now + LOOK_S
            if any(board[BROKEN] for board in self._boards):
                raise ReshardError("another rank gave the transfer up", REBUILD)
            if not _lives(int(self._boards[rank][PROCESS])):
                raise ReshardError(f"rank {rank} died in a transfer", REBUILD)
            if now > deadline:
                raise ReshardError(f"rank {rank} did not {what} within {self.timeout_s:g} s", REBUILD)

    # Opening

    def _open(self, token: str) -> None:
        host = self._device.type == "cpu"
        board_bytes = 8 * (WELL + 2 + self.ranks)
        size = board_bytes + segment.SEAL_BYTES + (self.nbytes if host else 0)
        ring = None if host else torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        handle = None if ring is None else DeviceHandle(ring)
        with segment.created(token, self.rank, size) as own:
            board = _board(own, board_bytes)
            board[PROCESS] = os.getpid()
            segment.seal(own, board_bytes, token, self.rank, handle.to_bytes() if handle is not None else b"")
            _fence()
            board[READY] = 1
            deadline = time.monotonic() + self.timeout_s
            for rank in range(self.ranks):
                theirs = own if rank == self.rank else segment.attached(token, rank, size, deadline)
                self._boards.append(_board(theirs, board_bytes))
                self._await_ready(rank, deadline)
                told = segment.unsealed(theirs, board_bytes, token, rank)
                if handle is None:
                    data = np.frombuffer(theirs, np.uint8, self.nbytes, board_bytes + segment.SEAL_BYTES)
                    self._rings.append(torch.from_numpy(data))
                else:
                    self._rings.append(handle.ring if rank == self.rank else handle.open(told))
            board[READY] = 2  # has seen all
            for rank, seen in enumerate(self._boards):
                self._wait(rank, seen, READY, 2, "open its ring")
        segment.remove_orphans()

    def _await_ready(self, rank: int, deadline: float) -> None:
        while not self._boards[rank][READY]:
            if time.monotonic() > deadline:
                raise ReshardError(f"rank {rank} did not finish opening its ring")
            time.sleep(0.002)
        _fence()


def _board(mapped: mmap.mmap, size: int) -> Board:
    return np.frombuffer(mapped, np.int64, size // 8)


def _taken(rank: int) -> int:
    return WELL + 2 + rank


_lock = threading.Lock()


def _fence() -> None:
    """What was written before is seen before what is written after, on processors that would reorder them."""
    with _lock:
        pass
    with _lock:
        pass


def _lives(process: int) -> bool:
    """False when it is gone, or a zombie: nobody has buried it yet."""
    status = Path(f"/proc/{process}/stat")
    if not Path("/proc/self/stat").exists():
        return True  # nobody to ask here: the time-out decides
    try:
        return status.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
