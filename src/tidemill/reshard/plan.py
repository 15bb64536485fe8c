"""Plans: which rank sends which box of which tensor to whom, computed once for two layouts.

Every byte that a rank needs and does not hold arrives there exactly once, so the bytes on the wire are the fewest
possible. Who sends is chosen nearest first (same rank, same device, same node, other node), then least busy. Ranks of
one node that all lack the same bytes each fetch a share of them from outside and pass it round inside: a slow link
carries nothing twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from tidemill.errors import ReshardError, did_you_mean
from tidemill.reshard.layouts.layout import (
    ITEM_BYTES,
    Box,
    Layout,
    LayoutEntry,
    LayoutPiece,
    Shape,
    extents,
    intersect,
    shift,
    volume,
)

SHARE_BYTES = 1 << 16  # what a node lacks is cut in shares no smaller than this
FAR = 1 << 30
EGRESS_SLACK = 1.1  # above it, receivers on one node pass bytes on even though a holder is near


@dataclass(frozen=True, slots=True)
class Topology:
    """Where ranks are. `per_node` 0: all on one node. `devices`: the device of each rank, where two ranks share one."""

    per_node: int = 0
    devices: tuple[int, ...] = ()

    def node(self, rank: int) -> int:
        return self.device(rank) // self.per_node if self.per_node else 0

    def device(self, rank: int) -> int:
        return self.devices[rank] if self.devices else rank

    def distance(self, a: int, b: int) -> int:
        if a == b:
            return 0
        if self.device(a) == self.device(b):
            return 1
        return 2 if self.node(a) == self.node(b) else 3


DISTANCES = ("same rank", "same device", "same node", "other node")


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a local tensor."""

    home: str
    at: Shape


class Transfer(NamedTuple):
    """`box` of `name` from `sender` to `receiver`, as `dtype`. At hop 1 the sender passes on what it received at hop 0:
    it reads from its own targets. A tuple, and its spots worked out when asked for: large plans have a million."""

    name: str
    box: Box
    dtype: str
    sender: int
    receiver: int
    held: LayoutPiece
    wanted: tuple[LayoutPiece, ...]
    nbytes: int
    hop: int = 0

    @property
    def source(self) -> Spot:
        return Spot(self.held.home, shift(self.held.at, self.held.box, self.box))

    @property
    def targets(self) -> tuple[Spot, ...]:
        return tuple(Spot(p.home, shift(p.at, p.box, self.box)) for p in self.wanted)

    def narrowed(self, box: Box) -> Transfer:
        return self._replace(box=box, nbytes=volume(box) * ITEM_BYTES[self.dtype])


@dataclass(frozen=True)
class Plan:
    source: Layout
    target: Layout
    topology: Topology
    transfers: tuple[Transfer, ...]  # those that cross between ranks
    copies: tuple[Transfer, ...]  # those that stay on their rank
    missing: dict[int, int]  # bytes that each receiving rank does not hold
    unique_bytes: int  # of them, counted once however many ranks lack them

    @cached_property
    def links(self) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for t in self.transfers:
            found[t.sender, t.receiver] = found.get((t.sender, t.receiver), 0) + t.nbytes
        return found

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    @property
    def bytes(self) -> int:
        return sum(self.links.values())

    @property
    def lower_bound_bytes(self) -> int:
        return sum(self.missing.values())

    @cached_property
    def egress(self) -> dict[int, int]:
        return _sum_by((s, n) for (s, _), n in self.links.items())

    @cached_property
    def ingress(self) -> dict[int, int]:
        return _sum_by((r, n) for (_, r), n in self.links.items())

    @cached_property
    def by_distance(self) -> dict[str, int]:
        """Bytes by how far they go; the first is what stays where it is."""
        found = dict.fromkeys(DISTANCES, 0)
        found[DISTANCES[0]] = sum(t.nbytes for t in self.copies)
        for (sender, receiver), n in self.links.items():
            found[DISTANCES[self.topology.distance(sender, receiver)]] += n
        return found

    @property
    def busiest_bytes(self) -> int:
        """The most that one rank sends or receives: with full-duplex links, what the transfer's time is made of."""
        return max((0, *self.egress.values(), *self.ingress.values()))

    @property
    def lower_bound_busiest_bytes(self) -> int:
        """No plan does better: a rank must receive what it lacks, and each missing byte leave some source once."""
        out = -(-self.unique_bytes // max(1, len(self.source.ranks)))
        return max((out, *self.missing.values()))

    @property
    def is_identity(self) -> bool:
        """Every target tensor is, byte for byte, a source tensor of the same rank: nothing needs to move at all."""
        if self.transfers or any(t.source.at != s.at for t in self.copies for s in t.targets):
            return False
        pairs = {(t.receiver, s.home): t.source.home for t in self.copies for s in t.targets}
        return all(
            self.source.homes(rank).get(pairs[rank, home]) == self.target.homes(rank)[home] for rank, home in pairs
        )


def plan(source: Layout, target: Layout, topology: Topology | None = None, *, direct: bool = False) -> Plan:
    """Who sends what to whom, so that every rank of `target` has its pieces. `direct`: nobody passes anything on."""
    topology = topology or Topology()
    needs = _needs(source, target)
    made = _assign(source, target, topology, needs, "direct" if direct else "near")
    if direct or made.busiest_bytes <= EGRESS_SLACK * made.lower_bound_busiest_bytes:
        return made
    relayed = _assign(source, target, topology, needs, "round")
    return relayed if relayed.busiest_bytes < made.busiest_bytes else made


# What must move


@dataclass(frozen=True, slots=True)
class Need:
    """A box with the same holders and the same takers all over: piece of each."""

    name: str
    dtype: str
    box: Box
    holders: dict[int, LayoutPiece]
    takers: dict[int, tuple[LayoutPiece, ...]]

    @property
    def nbytes(self) -> int:
        return volume(self.box) * ITEM_BYTES[self.dtype]


def _needs(source: Layout, target: Layout) -> list[Need]:
    # Layers look alike: the geometry of one serves all that are cut the same way.
    known: dict[tuple[tuple[LayoutEntry, ...], tuple[LayoutEntry, ...]], list[_Cell]] = {}
    needs = []
    for name, wanted in target.by_name.items():
        held = source.by_name.get(name)
        if held is None:
            raise ReshardError(
                f"the target wants {name!r}, which the source does not have{did_you_mean(name, source.by_name)}",
                "give both layouts the same logical names",
            )
        if held[0].shape != wanted[0].shape:
            raise ReshardError(f"{name} is {held[0].shape} at the source and {wanted[0].shape} at the target")
        forms = _form(held), _form(wanted)
        if forms not in known:
            known[forms] = _cells(
                Layout(forms[0], source.absent).pieces(_ANY), Layout(forms[1], target.absent).pieces(_ANY), name
            )
        dtype = min(wanted[0].dtype, held[0].dtype, key=ITEM_BYTES.__getitem__)  # the narrower travels
        needs += [_named(cell, name, dtype, held, wanted) for cell in known[forms]]
    return needs


_ANY = "any"
_Cell = tuple[Box, list[LayoutPiece], list[LayoutPiece]]  # box, who holds it, who wants it


def _form(entries: Sequence[LayoutEntry]) -> tuple[LayoutEntry, ...]:
    """The entries without their names: homes are numbered."""
    return tuple(replace(e, name=_ANY, home=str(i)) for i, e in enumerate(entries))


def _named(cell: _Cell, name: str, dtype: str, held: Sequence[LayoutEntry], wanted: Sequence[LayoutEntry]) -> Need:
    box, holders, takers = cell
    targets: dict[int, tuple[LayoutPiece, ...]] = {}
    for p in takers:
        targets[p.rank] = (*targets.get(p.rank, ()), replace(p, home=wanted[int(p.home)].local))
    sources = {p.rank: replace(p, home=held[int(p.home)].local) for p in reversed(holders)}
    return Need(name, dtype, box, sources, targets)


def _cells(held: list[LayoutPiece], wanted: list[LayoutPiece], name: str) -> list[_Cell]:
    """Cut what is wanted by what is held, so that each box has the same holders and takers all over."""
    sources, targets = _disjoint(held), _disjoint(wanted)
    cells = []
    for box, takers in targets.items():
        found = 0
        for other, holders in sources.items():
            common = intersect(box, other)
            if common is not None:
                cells.append((common, holders, takers))
                found += volume(common)
        if found != volume(box):
            raise ReshardError(f"no source rank holds all of {name}: {found} of the {volume(box)} elements of {box}")
    return cells


def _disjoint(pieces: Iterable[LayoutPiece]) -> dict[Box, list[LayoutPiece]]:
    """Pieces by box. Boxes that overlap in part are cut at each other's borders."""
    boxes: dict[Box, list[LayoutPiece]] = {}
    for piece in pieces:
        boxes.setdefault(piece.box, []).append(piece)
    if sum(map(volume, boxes)) == _covered(boxes):
        return boxes
    grid = [sorted({edge for box in boxes for edge in box[d]}) for d in range(len(next(iter(boxes))))]
    cells: dict[Box, list[LayoutPiece]] = {}
    for cell in itertools.product(*(list(itertools.pairwise(edges)) for edges in grid)):
        inside = [p for box, ps in boxes.items() if intersect(box, cell) is not None for p in ps]
        if inside:
            cells[cell] = inside
    return cells


def _covered(boxes: Iterable[Box]) -> int:
    """Volume of the union of boxes, by a sweep over their borders."""
    found = list(boxes)
    if not found:
        return 0
    if not found[0]:
        return 1
    edges = sorted({edge for box in found for edge in box[0]})
    if len(edges) == 2:
        return (edges[1] - edges[0]) * _covered({box[1:] for box in found})
    return sum(
        (high - low) * _covered({box[1:] for box in found if box[0][0] <= low and high <= box[0][1]})
        for low, high in itertools.pairwise(edges)
    )


# Who sends


_How = Literal["direct", "near", "round"]  # pass nothing on; what comes from other nodes; whatever few hold


class _Books:
    """What each rank has been asked to send and fetch so far."""

    def __init__(self, topology: Topology, ranks: Iterable[int]) -> None:
        self.topology = topology
        self.node = {r: topology.node(r) for r in ranks}
        self.out = dict.fromkeys(self.node, 0)
        self.into = dict.fromkeys(self.node, 0)
        self.transfers: list[Transfer] = []

    def sender(self, holders: Sequence[int], receiver: int) -> int:
        """Of holders on one side of the node's border: on the same device first, then least busy, then next round the
        ring from the receiver."""
        if len(holders) == 1:
            return holders[0]
        if self.topology.devices:
            device = self.topology.device(receiver)
            holders = [h for h in holders if self.topology.device(h) == device] or holders
        out = self.out
        return min(holders, key=lambda h: (out[h], (h - receiver) % FAR))

    def add(self, need: Need, box: Box, sender: int, receiver: int, hop: int = 0) -> None:
        made = _transfer(need, box, sender, receiver, hop)
        self.transfers.append(made)
        self.out[sender] += made.nbytes
        self.into[receiver] += made.nbytes


def _assign(source: Layout, target: Layout, topology: Topology, needs: list[Need], how: _How) -> Plan:
    books = _Books(topology, {*source.ranks, *target.ranks})
    copies: list[Transfer] = []
    missing = dict.fromkeys(target.ranks, 0)
    unique = 0
    for need in sorted(needs, key=lambda n: -n.nbytes):  # large ones first balance better; stable, so ranks agree
        copies += [_transfer(need, need.box, r, r) for r in need.takers if r in need.holders]
        nbytes = need.nbytes
        lacking = [r for r in need.takers if r not in need.holders]
        for rank in lacking:
            missing[rank] += nbytes
        unique += nbytes if lacking else 0
        for group in _by_node(lacking, books.node):
            _fetch(need, group, books, how)
    place = {name: i for i, name in enumerate(target.by_name)}
    transfers = sorted(books.transfers, key=lambda t: place[t.name])  # a tensor's bytes travel together
    return Plan(source, target, topology, tuple(transfers), tuple(copies), missing, unique)


def _by_node(ranks: list[int], node: dict[int, int]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(node[rank], []).append(rank)
    return list(found.values())


def _fetch(need: Need, group: list[int], books: _Books, how: _How) -> None:
    """Bring a box to all of `group`, ranks of one node that lack it."""
    node = books.node[group[0]]
    near = [h for h in need.holders if books.node[h] == node]
    holders = near or list(need.holders)
    if len(group) == 1 or how == "direct" or (near and not (how == "round" and len(group) > len(near))):
        for rank in group:
            books.add(need, need.box, books.sender(holders, rank), rank)
        return
    for i, share in enumerate(_shares(need, len(group))):
        # Whoever has fetched least so far takes the next share from outside, and passes it to the others.
        first = group[i] if need.nbytes >= SHARE_BYTES * len(group) else min(group, key=books.into.__getitem__)
        books.add(need, share, books.sender(holders, first), first)
        for rank in group:
            if rank != first:
                books.add(need, share, first, rank, hop=1)


def _shares(need: Need, count: int) -> list[Box]:
    if need.nbytes < SHARE_BYTES * count:
        return [need.box]
    return cut(need.box, count)


def cut(box: Box, count: int) -> list[Box]:
    """At most `count` parts, along the outermost dimension that is long enough, else along the longest."""
    sizes = extents(box)
    dim = next((d for d, n in enumerate(sizes) if n >= count), max(range(len(sizes)), key=sizes.__getitem__))
    low, high = box[dim]
    count = min(count, high - low)
    edges = [low + (high - low) * i // count for i in range(count + 1)]
    return [(*box[:dim], pair, *box[dim + 1 :]) for pair in itertools.pairwise(edges)]


def _transfer(need: Need, box: Box, sender: int, receiver: int, hop: int = 0) -> Transfer:
    held = need.takers[sender][0] if hop else need.holders[sender]
    nbytes = volume(box) * ITEM_BYTES[need.dtype]
    return Transfer(need.name, box, need.dtype, sender, receiver, held, need.takers[receiver], nbytes, hop)


def _sum_by(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key, n in pairs:
        found[key] = found.get(key, 0) + n
    return found
