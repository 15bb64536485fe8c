"""Delta: only the elements that changed, for links so slow that finding them costs less than sending the rest.

Late in training most 16-bit weights are the same from one version to the next. A delta names its base version; the
receiver must serve exactly that one, and the checksums of both, block by block, must be right, else nobody takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tidemill.errors import ReshardError
from tidemill.reshard import pack
from tidemill.reshard.layout import extents
from tidemill.reshard.move import REBUILD, TIMEOUT_S, Job, Moved, copy_local, own_copies
from tidemill.reshard.pack import Tensors
from tidemill.reshard.plan import Spot, Transfer

WHOLE, MASK, PLACES = 0, 1, 2  # how a block's changes are written: all of it, a bit per element, a number per change
BLOCK_BYTES = 16 << 20
HEAD = 8  # int64 words before a block: kind, changes, checksums of base and result, and room
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ASK_FOR_ALL = "publish the whole version to this rank"


@dataclass(frozen=True, slots=True)
class Base:
    """What both sides have: a version, and the tensors as they were in it. A sender keeps a copy of what it sent."""

    version: int
    tensors: Tensors


def remember(version: int, sources: Tensors) -> Base:
    """A copy on the host of what is being published, for the next delta."""
    return Base(version, {n: t.detach().to("cpu", copy=True) for n, t in sources.items()})


def encode(old: torch.Tensor, new: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a message that makes `new` of `old`, both contiguous: a head, and the changes in the shortest form.
    Elements are compared by their bits: -0 is not 0, and one NaN is not another."""
    bits = BITS[new.element_size()]
    before, after = old.reshape(-1).view(bits), new.reshape(-1).view(bits)
    mask = before != after
    changes = int(mask.sum())
    size, count = new.element_size(), after.numel()
    cost = {WHOLE: count * size, MASK: -(-count // 8) + changes * size, PLACES: changes * (4 + size)}
    kind = min(cost, key=lambda k: cost[k])
    head = torch.zeros(HEAD, dtype=torch.int64, device=new.device)
    head[0], head[1] = kind, changes
    head[2:4], head[4:6] = pack.checksum(old), pack.checksum(new)
    if kind == WHOLE:
        body = [after]
    elif kind == MASK:
        body = [_bits_packed(mask), after[mask]]
    else:
        body = [mask.nonzero().view(-1).to(torch.int32), after[mask]]
    return [head.view(torch.uint8), *(_padded(b) for b in body)]


def decode(message: torch.Tensor, at: int, old: torch.Tensor, what: str) -> tuple[torch.Tensor, int]:
    """`new` of `old` by the message at `at`, and where the next one begins. Raises when either checksum is wrong."""
    head = message[at : at + 8 * HEAD].view(torch.int64).tolist()
    at += 8 * HEAD
    kind, changes = head[:2]
    if pack.checksum(old).tolist() != head[2:4]:
        raise ReshardError(f"{what}: this rank's base is not the one that the delta was made from", ASK_FOR_ALL)
    bits = BITS[old.element_size()]
    new = old.reshape(-1).view(bits).clone()
    if kind == WHOLE:
        values, at = _part(message, at, new.numel(), bits)
        new.copy_(values)
    elif kind == MASK:
        packed, at = _part(message, at, -(-new.numel() // 8), torch.uint8)
        values, at = _part(message, at, changes, bits)
        new[_bits_unpacked(packed, new.numel())] = values
    else:
        places, at = _part(message, at, changes, torch.int32)
        values, at = _part(message, at, changes, bits)
        new[places.long()] = values
    made = new.view(old.dtype).view(old.shape)
    if pack.checksum(made).tolist() != head[4:6]:
        raise ReshardError(f"{what}: the delta arrived damaged", ASK_FOR_ALL)
    return made, at


def move_delta(
    job: Job, sent: Base, served: Base, group: dist.ProcessGroup | None = None, *, timeout_s: float = TIMEOUT_S
) -> Moved:
    """As `move`, with a direct plan: `job.targets` gets `job.version`, made of `served` and of what changed since
    `sent`. All ranks raise when one of them cannot take it."""
    limit = timedelta(seconds=timeout_s)
    moved = Moved(job.version)
    failure = ""
    try:
        if any(t.hop for t in job.plan.transfers):
            raise ReshardError("a delta needs a direct plan", "make it with plan(…, direct=True)")
        outgoing = _messages(job, sent)
        incoming = _exchange(job, outgoing, group, limit)
        moved.sent_bytes = sum(m.numel() for m in outgoing.values())
        moved.received_bytes = sum(m.numel() for m in incoming.values())
        for sender, message in incoming.items():
            _apply(job, sender, message, served)
        for transfer in own_copies(job):
            copy_local(transfer, job, moved, BLOCK_BYTES)
    except ReshardError as error:
        failure = str(error)
    well = torch.tensor([0 if failure else 1])
    work = dist.all_reduce(well, dist.ReduceOp.MIN, group=group, async_op=True)
    assert work is not None
    work.wait(limit)
    if not well.item():
        raise ReshardError(failure or f"another rank could not take the delta to version {job.version}", REBUILD)
    return moved


def _blocks(job: Job, sender: int, receiver: int) -> Iterator[Transfer]:
    for transfer in job.plan.transfers:
        if transfer.sender == sender and transfer.receiver == receiver:
            yield from pack.pieces_of(transfer, BLOCK_BYTES)


def _messages(job: Job, base: Base) -> dict[int, torch.Tensor]:
    """What this rank sends to each other: base and new version, then its blocks."""
    receivers = dict.fromkeys(t.receiver for t in job.plan.transfers if t.sender == job.rank)
    found = {}
    for receiver in receivers:
        parts = [torch.tensor([base.version, job.version]).view(torch.uint8)]
        for block in _blocks(job, job.rank, receiver):
            old, new = (_read(block, block.source, tensors) for tensors in (base.tensors, job.sources))
            parts += [p.cpu() for p in encode(old.to(new.device), new)]
        found[receiver] = torch.cat(parts)
    return found


def _read(block: Transfer, spot: Spot, tensors: Tensors) -> torch.Tensor:
    view = pack.region(tensors, spot, extents(block.box))
    return view.to(getattr(torch, block.dtype)).reshape(extents(block.box)).contiguous()


def _exchange(
    job: Job, outgoing: dict[int, torch.Tensor], group: dist.ProcessGroup | None, limit: timedelta
) -> dict[int, torch.Tensor]:
    """Lengths first, then messages."""
    senders = dict.fromkeys(t.sender for t in job.plan.transfers if t.receiver == job.rank)
    lengths = {s: torch.zeros(1, dtype=torch.int64) for s in senders}
    mine = {r: torch.tensor([m.numel()]) for r, m in outgoing.items()}
    _swap_messages(mine, lengths, group, limit, tag=1)
    incoming = {s: torch.empty(int(n), dtype=torch.uint8) for s, n in lengths.items()}
    _swap_messages(outgoing, incoming, group, limit, tag=2)
    return incoming


def _swap_messages(
    out: dict[int, torch.Tensor],
    into: dict[int, torch.Tensor],
    group: dist.ProcessGroup | None,
    limit: timedelta,
    tag: int,
) -> None:
    operations = [dist.P2POp(dist.irecv, m, group=group, group_peer=s, tag=tag) for s, m in into.items()]
    operations += [dist.P2POp(dist.isend, m, group=group, group_peer=r, tag=tag) for r, m in out.items()]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait(limit)


def _apply(job: Job, sender: int, message: torch.Tensor, base: Base) -> None:
    made_from, version = message[:16].view(torch.int64).tolist()
    if (made_from, version) != (base.version, job.version):
        raise ReshardError(
            f"rank {sender} sent a delta from version {made_from} to {version}; "
            f"this rank serves {base.version} and was told {job.version}",
            ASK_FOR_ALL,
        )
    at = 16
    for block in _blocks(job, sender, job.rank):
        for spot in block.targets[:1]:
            old = _read(block, spot, base.tensors)
            new, at = decode(message, at, old.cpu(), block.name)
        pack.write(block, job.targets, new)


def _padded(part: torch.Tensor) -> torch.Tensor:
    """Bytes up to a whole word: what follows begins at one."""
    flat = part.contiguous().view(torch.uint8)
    short = -flat.numel() % pack.ALIGN
    return torch.nn.functional.pad(flat, (0, short)) if short else flat


def _part(message: torch.Tensor, at: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    size = count * dtype.itemsize
    return message[at : at + size].view(dtype), at + -(-size // pack.ALIGN) * pack.ALIGN


def _bits_packed(mask: torch.Tensor) -> torch.Tensor:
    rows = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1).to(torch.uint8)


def _bits_unpacked(packed: torch.Tensor, count: int) -> torch.Tensor:
    rows = packed.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (rows & 1).view(-1)[:count].bool()
