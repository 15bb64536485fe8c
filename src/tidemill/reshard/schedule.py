"""Schedules: a plan cut into rounds, so that no rank ever holds more than one buffer's worth of a round.

Pure arithmetic, the same on every rank: whoever has the plan knows what every message holds, so none carries a header.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

from tidemill.reshard.pack import CHECK_BYTES, pieces_of, room
from tidemill.reshard.plan import Plan, Transfer

FILL = 4  # blocks are at most a quarter of what a round may carry, so that rounds fill well
NEVER, ALL = 0, 1  # one block in how many is checked


@dataclass(frozen=True, slots=True)
class Slot:
    """A block in a message: where its bytes begin, and its checksum (-1: not checked)."""

    transfer: Transfer
    at: int
    check_at: int = -1


@dataclass(slots=True)
class RoundMessage:
    """What one rank sends another in one round; in a shared ring, what it lays out for all."""

    slots: list[Slot] = field(default_factory=list)
    nbytes: int = 0

    def add(self, transfer: Transfer, checked: bool) -> Slot:
        size = room(transfer)
        slot = Slot(transfer, self.nbytes, self.nbytes + size if checked else -1)
        self.slots.append(slot)
        self.nbytes += size + (CHECK_BYTES if checked else 0)
        return slot


@dataclass(slots=True)
class Round:
    """One rank's part in a round: messages by peer."""

    out: dict[int, RoundMessage] = field(default_factory=dict)
    into: dict[int, RoundMessage] = field(default_factory=dict)


def rounds(plan: Plan, rank: int, *, half_bytes: int, depth: int, check_every: int, version: int) -> list[Round]:
    """The rounds of `rank`: in each it sends at most `half_bytes` and receives at most as many.

    A block that is passed on (hop 1) goes `depth` rounds after it came, when it has surely been unpacked.
    """
    sent: dict[int, list[int]] = {r: [] for r in plan.ranks}
    received: dict[int, list[int]] = {r: [] for r in plan.ranks}
    begins: dict[tuple[bool, int], int] = {}  # first round of a rank that has room left
    came: dict[tuple[object, ...], int] = {}
    mine: list[Round] = []
    index = 0
    for transfer in spread(plan.transfers):
        for piece in pieces_of(transfer, half_bytes // FILL):
            checked = is_checked(index, check_every, version)
            index += 1
            size = room(piece) + (CHECK_BYTES if checked else 0)
            earliest = came[piece.name, piece.box, piece.sender] + depth if piece.hop else 0
            at = _first_fit(sent[piece.sender], received[piece.receiver], size, half_bytes, earliest, begins, piece)
            if not piece.hop:
                came[piece.name, piece.box, piece.receiver] = at
            while len(mine) <= at:
                mine.append(Round())
            if piece.sender == rank:
                mine[at].out.setdefault(piece.receiver, RoundMessage()).add(piece, checked)
            if piece.receiver == rank:
                mine[at].into.setdefault(piece.sender, RoundMessage()).add(piece, checked)
    return mine


def spread(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Each tensor's transfers ordered so that neighbours in the list are between different ranks; first hops first."""
    found: list[Transfer] = []
    for _, group in groupby(transfers, key=lambda t: t.name):
        ranks = list(group)
        n = 1 + max(max(t.sender, t.receiver) for t in ranks)
        found += sorted(ranks, key=lambda t: (t.hop, (t.receiver - t.sender) % n, t.sender))
    return found


def is_checked(index: int, every: int, version: int) -> bool:
    """Which blocks carry a checksum: none, all, or a sample that moves on with the version until all were in it."""
    return every > 0 and (index + version) % every == 0


def _first_fit(
    sent: list[int],
    received: list[int],
    size: int,
    most: int,
    earliest: int,
    begins: dict[tuple[bool, int], int],
    piece: Transfer,
) -> int:
    """The first round in which both ends have room. Rounds that are nearly full are not looked at again."""
    out, into = (True, piece.sender), (False, piece.receiver)
    at = max(earliest, begins.get(out, 0), begins.get(into, 0))
    while (at < len(sent) and sent[at] + size > most) or (at < len(received) and received[at] + size > most):
        at += 1
    for fill, key in ((sent, out), (received, into)):
        fill.extend(0 for _ in range(at + 1 - len(fill)))
        fill[at] += size
        first = begins.get(key, 0)
        while first < len(fill) and fill[first] > most - most // (2 * FILL):
            first += 1
        begins[key] = first
    return at


# The shared ring: each rank lays its blocks out once, for whoever wants them


@dataclass(slots=True)
class Page:
    """One fill of a rank's ring: blocks, and for each who reads it and where to."""

    nbytes: int = 0
    blocks: list[tuple[Slot, dict[int, Transfer]]] = field(default_factory=list)

    @property
    def readers(self) -> set[int]:
        return {rank for _, readers in self.blocks for rank in readers}


def pages(plan: Plan, *, page_bytes: int, check_every: int, version: int) -> dict[int, list[Page]]:
    """Each rank's pages. A block that several ranks want is laid out once, so nothing needs passing on."""
    wanted: dict[tuple[object, ...], dict[int, Transfer]] = {}
    for transfer in plan.transfers:
        for piece in pieces_of(transfer, page_bytes // FILL):
            wanted.setdefault((piece.sender, piece.name, piece.box, piece.source), {})[piece.receiver] = piece
    made: dict[int, list[Page]] = {r: [] for r in plan.ranks}
    for index, readers in enumerate(wanted.values()):
        piece = next(iter(readers.values()))
        checked = is_checked(index, check_every, version)
        size = room(piece) + (CHECK_BYTES if checked else 0)
        mine = made[piece.sender]
        if not mine or mine[-1].nbytes + size > page_bytes:
            mine.append(Page())
        page = mine[-1]
        slot = Slot(piece, page.nbytes, page.nbytes + room(piece) if checked else -1)
        page.nbytes += size
        page.blocks.append((slot, readers))
    return made
