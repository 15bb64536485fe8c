"""Layouts: how one model's tensors lie over ranks, as data.

A layout is a list of entries. An entry says of one logical tensor (its name and shape in the whole model) in which
local tensor it lives (its home), over which mesh the home is cut, and how. From that every rank's pieces follow: which
box of the logical tensor lies where in which local tensor. Planning needs nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tidemill.errors import ReshardError, did_you_mean

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # half-open interval of each dimension

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks on a grid with named axes; `ranks` is the grid in row-major order."""

    axes: tuple[str, ...]
    shape: Shape
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or math.prod(self.shape) != len(self.ranks):
            raise ReshardError(f"a mesh {dict(zip(self.axes, self.shape))} does not hold {len(self.ranks)} ranks")

    def at(self, axis: str, index: int) -> Mesh:
        """The part of the mesh at one coordinate of an axis: a pipeline stage, one replica."""
        which = self.axes.index(axis)
        kept = [r for place, r in self.coordinates() if place[which] == index]
        drop = slice(which, which + 1)
        axes, shape = list(self.axes), list(self.shape)
        del axes[drop], shape[drop]
        return Mesh(tuple(axes), tuple(shape), tuple(kept))

    def coordinates(self) -> Iterator[tuple[Shape, int]]:
        return zip(itertools.product(*map(range, self.shape)), self.ranks)


def mesh(ranks: int | Iterable[int] = 0, /, **axes: int) -> Mesh:
    """`mesh(dp=2, tp=4)`: ranks 0 to 7, tp fastest. `mesh(8, tp=4)` begins at rank 8."""
    size = math.prod(axes.values())
    given = tuple(range(ranks, ranks + size)) if isinstance(ranks, int) else tuple(ranks)
    return Mesh(tuple(axes), tuple(axes.values()), given)


@dataclass(frozen=True, slots=True)
class Shard:
    """An axis cuts dimension `dim` in equal parts (the last ones may be shorter or empty).

    `parts`: fewer parts than the axis is long, each held by several neighbours (key heads under wide tensor
    parallelism). `step`: the length of a part, where padding fixes it (vocabularies).
    """

    dim: int
    parts: int = 0
    step: int = 0

    def cut(self, low: int, high: int, coordinate: int, size: int) -> tuple[int, int]:
        parts = self.parts or size
        step = self.step or -(-(high - low) // parts)
        start = min(low + coordinate * parts // size * step, high)
        return start, min(start + step, high)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same."""


Place = Shard | Replicate


@dataclass(frozen=True, slots=True)
class Part:
    """What a home holds of a logical tensor when it holds more, or less: `extent` elements (of the logical tensor's
    dimensions) from `start` in the logical tensor, found from `at` in the uncut home, whose shape is `whole`."""

    start: Shape
    extent: Shape
    at: Shape
    whole: Shape


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One logical tensor in one home. `places` cut the home, one per axis of the mesh, in `order` of axes."""

    name: str
    shape: Shape
    dtype: str
    mesh: Mesh
    places: tuple[Place, ...]
    home: str = ""  # "": a local tensor of the same name
    order: tuple[int, ...] = ()  # (): as the axes come
    part: Part | None = None  # fused before cutting: the home is one tensor and is cut as one
    ahead: Shape = ()  # fused after cutting: how far into the local tensor this one begins

    def __post_init__(self) -> None:
        if len(self.places) != len(self.mesh.axes):
            raise ReshardError(f"{self.name}: {len(self.places)} placements for mesh axes {self.mesh.axes}")
        if self.dtype not in ITEM_BYTES:
            raise ReshardError(f"{self.name}: dtype {self.dtype!r} is unknown{did_you_mean(self.dtype, ITEM_BYTES)}")
        for place in self.places:
            if isinstance(place, Shard) and not 0 <= place.dim < len(self.whole):
                raise ReshardError(f"{self.name}: no dimension {place.dim} to cut in shape {self.whole}")

    @property
    def local(self) -> str:
        return self.home or self.name

    @property
    def whole(self) -> Shape:
        return self.part.whole if self.part else self.shape

    def home_box(self, coordinate: Shape) -> Box:
        """What of the uncut home the rank at `coordinate` holds."""
        box = [(0, n) for n in self.whole]
        for axis in self.order or range(len(self.places)):
            place = self.places[axis]
            if isinstance(place, Shard):
                box[place.dim] = place.cut(*box[place.dim], coordinate[axis], self.mesh.shape[axis])
        return tuple(box)

    def piece(self, coordinate: Shape, rank: int) -> LayoutPiece | None:
        held = self.home_box(coordinate)
        part = self.part or Part((0,) * len(self.shape), self.shape, (0,) * len(self.shape), self.shape)
        extent = fit(part.extent, len(part.whole))
        wanted = tuple((a, a + n) for a, n in zip(part.at, extent))
        common = intersect(held, wanted)
        if common is None:
            return None
        # From the home's coordinates to the logical tensor's; where the two differ in rank the extra dimensions are 1.
        moved = [(low - a, high - a) for (low, high), a in zip(common, part.at)]
        lead = len(self.shape) - len(moved)
        moved = [(0, 1)] * lead + moved if lead >= 0 else moved[-lead:]
        box = tuple((low + s, high + s) for (low, high), s in zip(moved, part.start))
        ahead = self.ahead or (0,) * len(held)
        at = tuple(low - first + skip for (low, _), (first, _), skip in zip(common, held, ahead))
        return LayoutPiece(rank, box, self.local, at)


@dataclass(frozen=True, slots=True)
class LayoutPiece:
    """`box` of a logical tensor lies on `rank`, in the local tensor `home`, from `at` on."""

    rank: int
    box: Box
    home: str
    at: Shape


@dataclass(frozen=True)
class Layout:
    """All tensors of one side. A name may have several entries: the same bytes on other ranks or in other homes."""

    entries: tuple[LayoutEntry, ...]
    absent: frozenset[int] = frozenset()  # ranks that are not there any more, and what they held with them

    def __post_init__(self) -> None:
        for name, entries in self.by_name.items():
            if len({(e.shape, e.dtype) for e in entries}) > 1:
                raise ReshardError(f"{name} has more than one shape or dtype in a layout")

    @cached_property
    def by_name(self) -> dict[str, list[LayoutEntry]]:
        found: dict[str, list[LayoutEntry]] = {}
        for entry in self.entries:
            found.setdefault(entry.name, []).append(entry)
        return found

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({r for m in {e.mesh for e in self.entries} for r in m.ranks} - self.absent))

    @property
    def nbytes(self) -> int:
        """Of one whole model."""
        return sum(math.prod(e[0].shape) * ITEM_BYTES[e[0].dtype] for e in self.by_name.values())

    def pieces(self, name: str) -> list[LayoutPiece]:
        found = (e.piece(place, rank) for e in self.by_name.get(name, ()) for place, rank in e.mesh.coordinates())
        return [p for p in found if p is not None and volume(p.box) and p.rank not in self.absent]

    def homes(self, rank: int) -> dict[str, tuple[Shape, str]]:
        """The local tensors of a rank: the smallest shapes that hold its pieces, and their dtypes."""
        found: dict[str, tuple[Shape, str]] = {}
        for entry in self.entries:
            place = next((c for c, r in entry.mesh.coordinates() if r == rank), None)
            if place is None:
                continue
            ahead = entry.ahead or (0,) * len(entry.whole)
            shape = tuple(high - low + skip for (low, high), skip in zip(entry.home_box(place), ahead))
            before = found.get(entry.local, (shape, entry.dtype))[0]
            found[entry.local] = (tuple(map(max, before, shape)), entry.dtype)
        return found

    def astype(self, dtype: str) -> Layout:
        return replace(self, entries=tuple(replace(e, dtype=dtype) for e in self.entries))

    def without(self, ranks: Iterable[int]) -> Layout:
        return replace(self, absent=self.absent | frozenset(ranks))


def merge(layouts: Iterable[Layout]) -> Layout:
    """One layout of what every rank told of its own tensors: each pipeline stage knows only its own."""
    return Layout(tuple(dict.fromkeys(e for layout in layouts for e in layout.entries)))


# Boxes


def intersect(a: Box, b: Box) -> Box | None:
    box = []
    for (a0, a1), (b0, b1) in zip(a, b):
        low, high = max(a0, b0), min(a1, b1)
        if low >= high:
            return None
        box.append((low, high))
    return tuple(box)


def volume(box: Box) -> int:
    size = 1
    for low, high in box:
        size *= high - low
    return size


def extents(box: Box) -> Shape:
    return tuple(high - low for low, high in box)


def fit(extent: Shape, ndim: int) -> Shape:
    """The same block in a tensor of another number of dimensions: leading ones come or go."""
    lead = len(extent) - ndim
    if lead > 0 and any(n != 1 for n in extent[:lead]):
        raise ReshardError(f"a block of shape {extent} does not fit a tensor of {ndim} dimensions")
    return extent[lead:] if lead > 0 else (1,) * -lead + extent


def shift(at: Shape, box: Box, inner: Box) -> Shape:
    """Where `inner` begins in a local tensor in which `box` begins at `at`."""
    offsets = fit_offset(tuple(i[0] - b[0] for i, b in zip(inner, box)), len(at))
    return tuple(a + o for a, o in zip(at, offsets))


def fit_offset(offset: Shape, ndim: int) -> Shape:
    lead = len(offset) - ndim
    return offset[lead:] if lead > 0 else (0,) * -lead + offset
