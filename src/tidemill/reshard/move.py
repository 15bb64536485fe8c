"""Move: run a plan over a process group, in rounds through a small ring of buffers.

While one round's messages travel the next is packed and the last unpacked. Extra memory is the ring, and one block
where a checksum is read back.
Nothing is known here of what the group runs on: gloo, NCCL and HCCL are asked alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from tidemill.errors import ReshardError
from tidemill.reshard import pack
from tidemill.reshard.layouts.layout import extents
from tidemill.reshard.pack import CHECK_BYTES, Changes, Tensors
from tidemill.reshard.plan import Plan, Transfer
from tidemill.reshard.schedule import Round, RoundMessage, rounds

Verify = Literal["off", "sample", "all"]
CHECK_EVERY: Mapping[str, int] = {"off": 0, "sample": 16, "all": 1}
BUCKET_BYTES = 64 << 20  # of one ring buffer, half for what goes and half for what comes
DEPTH = 2
TIMEOUT_S = 300.0
REBUILD = "the old version is still whole; rebuild the group from the ranks that live and publish again"


@dataclass(slots=True)
class Moved:
    """What one rank did in a transfer."""

    version: int
    sent_bytes: int = 0
    received_bytes: int = 0
    copied_bytes: int = 0  # within the rank
    checked: int = 0  # blocks
    rounds: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """One transfer, as one rank sees it."""

    plan: Plan
    rank: int
    sources: Tensors
    targets: Tensors
    version: int
    verify: Verify = "sample"
    changes: Changes | None = None  # adapters that are merged on the way

    def tensors(self, transfer: Transfer) -> Tensors:
        """What a block is read from: a block that is passed on lies in the targets."""
        return self.targets if transfer.hop else self.sources


class WeightWire(Protocol):
    """How bytes get from rank to rank."""

    def carry(self, job: Job, moved: Moved) -> None:
        """Run the plan; every rank calls it. Raises, on every rank, when any of them cannot finish."""

    def agree(self, ok: bool, version: int) -> bool:
        """Whether all ranks are well: nobody takes up a version that somebody lacks."""

    def close(self) -> None: ...


def move(job: Job, wire: WeightWire) -> Moved:
    """Bring `job.targets` to the version in `job.sources`, over all ranks of the plan at once.

    When it returns, every rank has everything. When it raises, no rank has returned: the targets are worthless, the
    version that served before is to go on serving, and the wire must be made anew.
    """
    started = time.perf_counter()
    moved = Moved(job.version)
    with torch.no_grad():
        try:
            wire.carry(job, moved)
        except ReshardError:
            wire.close()
            raise
        except (RuntimeError, OSError) as error:
            wire.close()
            raise ReshardError(
                f"weights version {job.version} stopped half way on rank {job.rank}: {error}", REBUILD
            ) from error
    moved.seconds = time.perf_counter() - started
    return moved


def confirm(wire: WeightWire, job: Job, moved: Moved, checks: Checks) -> None:
    """The end of a transfer: every rank found every block whole, or all of them raise."""
    failure = checks.failure()
    moved.checked = len(checks.of)
    if not wire.agree(not failure, job.version):
        raise ReshardError(
            f"weights version {job.version} did not arrive whole: {failure or 'another rank found wrong bytes'}",
            REBUILD,
        )


class BufferRing:
    """`depth` buffers of `bucket_bytes` each, allocated once."""

    def __init__(
        self, depth: int = DEPTH, bucket_bytes: int = BUCKET_BYTES, device: torch.device | str = "cpu"
    ) -> None:
        if not 2 <= depth <= 8:
            raise ReshardError(f"a ring of {depth} buffers cannot overlap", "use 2 or 3")
        self.depth = depth
        self.half_bytes = max(256, bucket_bytes // 2 // pack.ALIGN * pack.ALIGN)
        self.bucket_bytes = 2 * self.half_bytes
        self.nbytes = depth * self.bucket_bytes
        self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def going(self, turn: int) -> torch.Tensor:
        return self._buffer.narrow(0, turn % self.depth * self.bucket_bytes, self.half_bytes)

    def coming(self, turn: int) -> torch.Tensor:
        return self._buffer.narrow(0, turn % self.depth * self.bucket_bytes + self.half_bytes, self.half_bytes)


@dataclass(slots=True)
class _Flying:
    """One rank's part in a round whose messages are under way."""

    turn: int
    round: Round
    works: list[dist.Work]


@dataclass(slots=True)
class Checks:
    """Checksums compared so far. Results stay on the device until the end: comparing costs no wait."""

    wrong: list[torch.Tensor] = field(default_factory=list)
    of: list[Transfer] = field(default_factory=list)

    def compare(self, transfer: Transfer, tensors: Tensors, expected: torch.Tensor) -> None:
        for found in pack.written_checksum(transfer, tensors):
            self.wrong.append((found != expected).any())
            self.of.append(transfer)

    def failure(self) -> str:
        """'' or which tensors came out wrong."""
        if not self.wrong:
            return ""
        bad = [t for t, wrong in zip(self.of, torch.stack(self.wrong).tolist()) if wrong]
        if not bad:
            return ""
        listed = ", ".join(dict.fromkeys(f"{t.name} from rank {t.sender}" for t in bad[:4]))
        return f"{len(bad)} of {len(self.of)} blocks do not match their checksums: {listed}"


class GroupWire:
    """Messages of a process group; ranks of the plan are ranks of the group."""

    def __init__(
        self,
        ring: BufferRing,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        tamper: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.ring = ring
        self.group = group
        self.timeout = timedelta(seconds=timeout_s)
        self._tamper = tamper  # tests flip bits of what came before it is unpacked
        self._turn = 0
        self._schedules: dict[tuple[int, int, int], tuple[Plan, list[Round]]] = {}

    def carry(self, job: Job, moved: Moved) -> None:
        flying: deque[_Flying] = deque()
        checks = Checks()
        steps = self._rounds(job)
        moved.rounds = len(steps)
        copies = own_copies(job)
        self.agree(True, job.version)  # all are here, and mean the same version
        for step in steps:
            if len(flying) == self.ring.depth:
                self._land(flying.popleft(), job, moved, checks)
            flying.append(self._launch(step, job, moved))
            if copies:  # while messages travel
                copy_local(copies.popleft(), job, moved, self.ring.half_bytes)
        while flying:
            self._land(flying.popleft(), job, moved, checks)
        while copies:
            copy_local(copies.popleft(), job, moved, self.ring.half_bytes)
        confirm(self, job, moved, checks)

    def agree(self, ok: bool, version: int) -> bool:
        low, high = self._least([version if ok else -1, -version])
        if low >= 0 and low != -high:
            raise ReshardError(f"ranks publish different versions: {low} and {-high}", "publish one version at a time")
        return low == version

    def close(self) -> None:
        """Nothing is held: the group belongs to whoever made it."""

    def _least(self, numbers: list[int]) -> list[int]:
        """Of each number, the least that any rank says."""
        word = torch.tensor(numbers, device=self.ring.going(0).device)
        work = dist.all_reduce(word, dist.ReduceOp.MIN, group=self.group, async_op=True)
        assert work is not None
        work.wait(self.timeout)
        least: list[int] = word.tolist()
        return least

    def _rounds(self, job: Job) -> list[Round]:
        every = CHECK_EVERY[job.verify]
        key = (id(job.plan), every, job.version % max(1, every))
        if key not in self._schedules:
            half, depth = self.ring.half_bytes, self.ring.depth
            made = rounds(job.plan, job.rank, half_bytes=half, depth=depth, check_every=every, version=key[2])
            self._schedules[key] = job.plan, made  # the plan is kept so that its id stays its own
        return self._schedules[key][1]

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn - 1

    def _launch(self, step: Round, job: Job, moved: Moved) -> _Flying:
        turn = self._next_turn()
        operations = []
        for peer, message, part in _laid_out(step.into, self.ring.coming(turn)):
            operations.append(dist.P2POp(dist.irecv, part, group=self.group, group_peer=peer, tag=turn))
            moved.received_bytes += message.nbytes
        for peer, message, part in _laid_out(step.out, self.ring.going(turn)):
            _fill(message, part, job)
            operations.append(dist.P2POp(dist.isend, part, group=self.group, group_peer=peer, tag=turn))
            moved.sent_bytes += message.nbytes
        return _Flying(turn, step, dist.batch_isend_irecv(operations) if operations else [])

    def _land(self, flying: _Flying, job: Job, moved: Moved, checks: Checks) -> None:
        for work in flying.works:
            work.wait(self.timeout)
        buffer = self.ring.coming(flying.turn)
        if self._tamper:
            self._tamper(buffer)
        for _, message, part in _laid_out(flying.round.into, buffer):
            for slot in message.slots:
                unpack(slot.transfer, job.targets, part, slot.at, slot.check_at, checks)


def _laid_out(
    messages: Mapping[int, RoundMessage], buffer: torch.Tensor
) -> list[tuple[int, RoundMessage, torch.Tensor]]:
    """Messages one after the other in a buffer."""
    found, at = [], 0
    for peer, message in messages.items():
        found.append((peer, message, buffer.narrow(0, at, message.nbytes)))
        at += message.nbytes
    return found


def _fill(message: RoundMessage, part: torch.Tensor, job: Job) -> None:
    for slot in message.slots:
        lay(slot.transfer, job, part, slot.at, slot.check_at)


def lay(transfer: Transfer, job: Job, buffer: torch.Tensor, at: int, check_at: int) -> None:
    """Pack a block, and its checksum behind it."""
    block = pack.block(buffer, at, transfer)
    pack.read(transfer, job.tensors(transfer), block, job.changes)
    if check_at >= 0:
        buffer[check_at : check_at + CHECK_BYTES].view(torch.int64).copy_(pack.checksum(block))


def unpack(transfer: Transfer, tensors: Tensors, buffer: torch.Tensor, at: int, check_at: int, checks: Checks) -> None:
    """Write a block to its targets, read it back and compare."""
    pack.write(transfer, tensors, pack.block(buffer, at, transfer))
    if check_at >= 0:
        expected = buffer[check_at : check_at + CHECK_BYTES].view(torch.int64).clone()
        checks.compare(transfer, tensors, expected)


def own_copies(job: Job) -> deque[Transfer]:
    return deque(t for t in job.plan.copies if t.receiver == job.rank)


def copy_local(transfer: Transfer, job: Job, moved: Moved, most_bytes: int) -> None:
    """A block that stays on its rank; one that already lies where it should is left alone."""
    if job.changes and transfer.name in job.changes:
        for piece in pack.pieces_of(transfer, most_bytes):
            merged = torch.empty(extents(piece.box), dtype=getattr(torch, piece.dtype), device=_device(job))
            pack.read(piece, job.sources, merged, job.changes)
            pack.write(piece, job.targets, merged)
        moved.copied_bytes += transfer.nbytes
        return
    source = pack.region(job.sources, transfer.source, extents(transfer.box))
    for spot in transfer.targets:
        view = pack.region(job.targets, spot, extents(transfer.box))
        if view.data_ptr() != source.data_ptr():
            view.copy_(source.reshape(view.shape))
            moved.copied_bytes += transfer.nbytes


def _device(job: Job) -> torch.device:
    return next(iter(job.sources.values())).device
