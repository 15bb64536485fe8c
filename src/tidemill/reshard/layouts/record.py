"""A layout as plain values, for ranks that describe themselves to one another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tidemill.reshard.layouts.layout import Layout, LayoutEntry, Mesh, Part, Place, Replicate, Shape, Shard


def to_plain(layout: Layout) -> dict[str, Any]:
    """As JSON can carry it."""
    return {"entries": [asdict(entry) for entry in layout.entries], "absent": sorted(layout.absent)}


def from_plain(record: dict[str, Any]) -> Layout:
    return Layout(tuple(_entry(**entry) for entry in record["entries"]), frozenset(map(int, record["absent"])))


def _entry(
    name: str,
    shape: list[int],
    dtype: str,
    mesh: dict[str, Any],
    places: list[dict[str, int]],
    home: str,
    order: list[int],
    part: dict[str, list[int]] | None,
    ahead: list[int],
) -> LayoutEntry:
    return LayoutEntry(
        name=str(name),
        shape=_shape(shape),
        dtype=str(dtype),
        mesh=Mesh(tuple(map(str, mesh["axes"])), _shape(mesh["shape"]), _shape(mesh["ranks"])),
        places=tuple(_place(**place) for place in places),
        home=str(home),
        order=_shape(order),
        part=None if part is None else Part(**{key: _shape(numbers) for key, numbers in part.items()}),
        ahead=_shape(ahead),
    )


def _place(**numbers: int) -> Place:
    return Shard(**numbers) if numbers else Replicate()


def _shape(numbers: list[int]) -> Shape:
    return tuple(map(int, numbers))
