"""Weights whose every element says where it belongs, made box by box: no rank needs the whole model to check itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tidemill.reshard.layouts.layout import Box, Layout, LayoutPiece, extents
from tidemill.reshard.pack import region
from tidemill.reshard.plan import Spot, cut

PRIMES = (7919, 104_729, 1_299_709)
MODULUS = 16_381  # prime; bit patterns below 2**14 are finite 16-bit floats
CHUNK = 1 << 22  # elements


def values(tensor: int, box: Box) -> torch.Tensor:
    """The elements of a box of tensor number `tensor`, in bfloat16: the coordinates' hashes, exclusive-or'ed."""
    total = torch.full((1,) * len(box), tensor % MODULUS, dtype=torch.int16)
    for dim, (low, high) in enumerate(box):
        line = (torch.arange(low, high) * PRIMES[dim] % MODULUS).to(torch.int16)
        total = total ^ line.view([-1 if d == dim else 1 for d in range(len(box))])
    return total.view(torch.bfloat16)


def empty(layout: Layout, rank: int, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """A rank's tensors, touched, so that their memory is really there."""
    homes = layout.homes(rank)
    return {n: torch.ones(shape, dtype=getattr(torch, d), device=device) for n, (shape, d) in homes.items()}


def filled(layout: Layout, rank: int, device: Any = "cpu") -> dict[str, torch.Tensor]:
    tensors = empty(layout, rank, device)
    for view, right in _expected(layout, rank, tensors):
        view.copy_(right.reshape(view.shape))
    return tensors


def is_right(layout: Layout, rank: int, tensors: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(view, right.reshape(view.shape).to(view)) for view, right in _expected(layout, rank, tensors)
    )


def _expected(layout: Layout, rank: int, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
    for number, name in enumerate(layout.by_name):
        for piece in layout.pieces(name):
            if piece.rank == rank:
                yield from _chunks(piece, number, tensors)


def _chunks(piece: LayoutPiece, number: int, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
    from tidemill.reshard.layouts.layout import shift, volume

    for box in cut(piece.box, max(1, volume(piece.box) // CHUNK)):
        at = shift(piece.at, piece.box, box)
        yield region(tensors, Spot(piece.home, at), extents(box)), values(number, box)
