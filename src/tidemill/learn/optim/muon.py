"""Muon (Jordan et al. 2024): the layers' matrices move along the orthogonalised momentum, everything else by AdamW.

The step is scaled to AdamW's usual size, 0.2 · sqrt(longer side) (Liu et al. 2025, arXiv:2502.16982), so learn.lr means
the same for both.

Where every rank has pieces of every matrix, momentum stays in pieces. For the step itself matrices go round the ranks:
each is put together on one of them, made orthogonal there, and sent back in pieces, as many matrices at a time as there
are ranks. So a step costs each rank its share of the products and, of every matrix, one piece out and one back.

torch.optim.Muon has the same formula, but wants whole matrices, computes in bfloat16 alone, one matrix at a time, and
knows no float32 copy and no state on the host: docs/dependencies.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tidemill.learn.optim.adam import Adam, stochastic_bfloat16
from tidemill.learn.parallel.collectives import MeshLink
from tidemill.learn.parallel.flight import Flight
from tidemill.learn.parallel.mesh import Meshes
from tidemill.reshard.layouts.layout import Box, Layout, Shape, extents, volume

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that pulls singular values towards 1
SIZE = 0.2  # root mean square of AdamW's update
MOST_AT_ONCE = 1 << 27  # elements of the matrices made orthogonal together


@dataclass(frozen=True, slots=True)
class Moving:
    """A matrix, or this process's piece of one, with its gradient and its group."""

    p: Parameter
    grad: Tensor
    group: dict[str, Any]


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


def _inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


@dataclass(frozen=True, slots=True)
class MatrixRanks:
    """The ranks that together have each matrix once or more: those of this pipeline stage and copy."""

    over: MeshLink
    matrices: Mapping[int, Matrix]  # by the id of this rank's piece

    @staticmethod
    def of(meshes: Meshes, flight: Flight, layout: Layout, pieces: Mapping[str, Parameter]) -> MatrixRanks | None:
        """None where every matrix is whole. All ranks call it together."""
        if meshes.made is None or (meshes.shard is None and meshes.tp is None):
            return None
        grid = meshes.made.sharded.mesh  # pp, replicate, shard, tp
        groups = [[int(r) for r in row] for row in grid.reshape(grid.shape[0] * grid.shape[1], -1).tolist()]
        timeout = timedelta(seconds=meshes.parallel.timeout_s)
        group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout)  # type: ignore[no-untyped-call]
        own = next(members for members in groups if dist.get_rank() in members)
        over = MeshLink("matrices", group, own, own.index(dist.get_rank()), flight)
        found = {}
        for name, p in pieces.items():
            entry = layout.by_name[name][0]
            held = {rank: entry.home_box(place) for place, rank in entry.mesh.coordinates()}
            found[id(p)] = Matrix(entry.shape, [held[rank] for rank in own])
        return MatrixRanks(over, found)


class Muon(Adam):
    """Groups with `is_matrix` are Muon's; their momentum is float32, whatever AdamW's moments are. Ranks that share
    matrices (`shared`) call `step` together."""

    def __init__(self, groups: Any, *, shared: MatrixRanks | None = None, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.shared = shared

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        matrices = []
        for group in self.param_groups:
            for p in group["params"]:
                grad = self.gradient(p)
                if grad is not None and group.get("is_matrix"):
                    matrices.append(Moving(p, grad, group))
                elif grad is not None:
                    self._step(p, grad, group)
        if self.shared is None:
            self._move_all(matrices)
        else:
            self._move_pieces(matrices, self.shared)

    def _move_all(self, matrices: list[Moving]) -> None:
        """Matrices of one shape are made orthogonal together: each by itself would leave a device half idle."""
        alike: dict[Any, list[Moving]] = {}
        for one in matrices:
            alike.setdefault((one.p.shape, one.p.dtype, one.p.device), []).append(one)
        for (shape, *_), all_of in alike.items():
            at_once = max(1, MOST_AT_ONCE // math.prod(shape))
            for first in range(0, len(all_of), at_once):
                some = all_of[first : first + at_once]
                made = orthogonal(torch.stack([self._direction(one) for one in some]))
                for one, direction in zip(some, made):
                    self._move(one.p, direction, one.group, max(shape))

    def _move_pieces(self, matrices: list[Moving], shared: MatrixRanks) -> None:
        # Those that are made at the same time are of like size.
        matrices = sorted(matrices, key=lambda one: -sum(shared.matrices[id(one.p)].sizes))
        ranks = shared.over.size
        for first in range(0, len(matrices), ranks):
            at_once = matrices[first : first + ranks]
            given = [(shared.matrices[id(one.p)], self._direction(one)) for one in at_once]
            for one, piece in zip(at_once, _orthogonal_pieces(given, shared.over)):
                self._move(one.p, piece, one.group, max(shared.matrices[id(one.p)].shape))

    def _direction(self, one: Moving) -> Tensor:
        """The momentum, one step ahead (Nesterov), in what Newton-Schulz is computed in: 16-bit weights cannot tell a
        finer step."""
        p, grad = one.p, one.grad.float()
        kept = self.state[p]
        if not kept:
            made = {"momentum": torch.zeros_like(p, dtype=torch.float32)}
            if self.master == "float32":
                made["master"] = p.detach().float().clone()
            kept.update(self._keep(p, made))
        kept["step"] += 1
        momentum = kept["momentum"].to(p.device, non_blocking=True)
        momentum.lerp_(grad, 1 - MOMENTUM)
        self._put_back(kept, {"momentum": momentum})
        return grad.lerp(momentum, MOMENTUM).to(torch.bfloat16 if p.dtype.itemsize == 2 else torch.float32)

    def _move(self, p: Parameter, direction: Tensor, group: dict[str, Any], longer_side: int) -> None:
        kept, rate = self.state[p], group["lr"] * SIZE * longer_side**0.5
        decay = 1 - group["lr"] * group["weight_decay"]
        seed = self._rounding(p, int(kept["step"]))
        if "master" not in kept and seed is None:
            p.mul_(decay).add_(direction.to(p.dtype), alpha=-rate)
            return
        weight = kept["master"].to(p.device, non_blocking=True) if "master" in kept else p.float()
        weight.mul_(decay).add_(direction, alpha=-rate)
        p.copy_(weight if seed is None else stochastic_bfloat16(weight, seed))
        if "master" in kept:
            self._put_back(kept, {"master": weight})


def orthogonal(x: Tensor) -> Tensor:
    """Near U Vᵀ of x = U S Vᵀ, by Newton-Schulz: singular values come to lie between about 0.7 and 1.2.

    x is a matrix, or a stack of them."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if is_tall else x).reshape(-1, *sorted(x.shape[-2:]))
    y = y / (torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True, dtype=torch.float32) + 1e-7).to(y.dtype)
    for _ in range(STEPS):
        square = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return (y.mT if is_tall else y).reshape(x.shape).contiguous()


def _orthogonal_pieces(given: list[tuple[Matrix, Tensor]], over: MeshLink) -> list[Tensor]:
    """This rank's pieces of as many matrices as there are ranks, or fewer; the i-th is rank i's work."""
    own = given[over.rank][0] if over.rank < len(given) else None
    out = [piece.numel() for _, piece in given] + [0] * (over.size - len(given))
    back = own.sizes if own is not None else [0] * over.size
    came = over.all_to_all(torch.cat([piece.reshape(-1) for _, piece in given]), out, back)
    made = own.cut(orthogonal(own.joined(came))) if own is not None else came
    pieces = torch.split(over.all_to_all(made, back, out), out[: len(given)])
    return [new.view(piece.shape) for new, (_, piece) in zip(pieces, given)]
