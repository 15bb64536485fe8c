"""Muon where every rank has pieces of every matrix.

Momentum stays in pieces. For the step itself matrices go round the ranks: each is put together on one of them, made
orthogonal there, and sent back in pieces, as many matrices at a time as there are ranks. So a step costs each rank its
share of the products and, of every matrix, one piece out and one back: what a reduce-scatter and a gather would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.learn.muon import Moving, Muon, orthogonal
from tidemill.learn.parallel.collectives import MeshLink
from tidemill.learn.parallel.flight import Flight
from tidemill.learn.parallel.mesh import Meshes
from tidemill.reshard.layout import Box, LayoutEntry, Shape, extents, volume


@dataclass(frozen=True, slots=True)
class Matrix:
    """A whole matrix, and which box of it each rank of a group has."""

    shape: Shape
    boxes: list[Box]

    @property
    def sizes(self) -> list[int]:
        return [volume(box) for box in self.boxes]

    def joined(self, pieces: Tensor) -> Tensor:
        """From every rank's piece, one after another."""
        whole = pieces.new_empty(self.shape)
        for box, piece in zip(self.boxes, torch.split(pieces, self.sizes)):
            whole[_inside(box)] = piece.view(extents(box))
        return whole

    def cut(self, whole: Tensor) -> Tensor:
        """What `joined` joins."""
        return torch.cat([whole[_inside(box)].reshape(-1) for box in self.boxes])


def matrix(entry: LayoutEntry, over: MeshLink) -> Matrix:
    held = {rank: entry.home_box(place) for place, rank in entry.mesh.coordinates()}
    return Matrix(entry.shape, [held[rank] for rank in over.ranks])


def _inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


def holders(meshes: Meshes, flight: Flight) -> MeshLink:
    """The ranks that together have each matrix once or more: those of this pipeline stage and copy. All ranks call."""
    grid = meshes.sharded.mesh  # pp, replicate, shard, tp
    groups = [[int(r) for r in row] for row in grid.reshape(grid.shape[0] * grid.shape[1], -1).tolist()]
    timeout = timedelta(seconds=meshes.parallel.timeout_s)
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout)  # type: ignore[no-untyped-call]
    own = next(members for members in groups if dist.get_rank() in members)
    return MeshLink("matrices", group, own, own.index(dist.get_rank()), flight)


class ShardedMuon(Muon):
    """`matrices`: by the id of this rank's piece. Ranks of `over` call `step` together."""

    def __init__(self, groups: Any, *, over: MeshLink, matrices: Mapping[int, Matrix], **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.over, self.matrices = over, matrices

    def _move_all(self, matrices: list[Moving]) -> None:
        # Those that are made at the same time are of like size.
        matrices = sorted(matrices, key=lambda one: -sum(self.matrices[id(one.p)].sizes))
        for first in range(0, len(matrices), self.over.size):
            at_once = matrices[first : first + self.over.size]
            given = [(self.matrices[id(one.p)], self._direction(one)) for one in at_once]
            for one, piece in zip(at_once, self._orthogonal(given)):
                self._move(one.p, piece, one.group, max(self.matrices[id(one.p)].shape))

    def _orthogonal(self, given: list[tuple[Matrix, Tensor]]) -> list[Tensor]:
        """This rank's pieces of as many matrices as there are ranks, or fewer; the i-th is rank i's work."""
        own = given[self.over.rank][0] if self.over.rank < len(given) else None
        out = [piece.numel() for _, piece in given] + [0] * (self.over.size - len(given))
        back = own.sizes if own is not None else [0] * self.over.size
        came = self.over.all_to_all(torch.cat([piece.reshape(-1) for _, piece in given]), out, back)
        made = own.cut(orthogonal(own.joined(came))) if own is not None else came
        pieces = torch.split(self.over.all_to_all(made, back, out), out[: len(given)])
        return [new.view(piece.shape) for new, (_, piece) in zip(pieces, given)]
