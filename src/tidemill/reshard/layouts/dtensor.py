"""Layouts from tensors as a learner holds them: DTensors of any mesh, and plain tensors.

Each rank describes what it holds; `merge` makes one layout of all descriptions (a pipeline stage or an expert group
knows only its own).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.distributed.tensor.placement_types import Shard as TorchShard

from tidemill.errors import ReshardError
from tidemill.reshard.layouts.layout import Layout, LayoutEntry, Mesh, Part, Place, Replicate, Shard

EXPERT = re.compile(r"^(?P<before>.*\.experts)\.(?P<index>\d+)\.(?P<after>.+)$")


def from_tensors(tensors: Mapping[str, torch.Tensor], rank: int, *, experts: int = 0) -> Layout:
    """The layout of one rank's named tensors. A plain tensor is whole, and this rank's own.

    `experts`: how many experts the model has, where each is a module of its own (`…experts.7.up_proj.weight`); they
    become slices of one logical tensor, `…experts.up_proj.weight`.
    """
    return Layout(tuple(_with_expert(_entry(name, tensor, rank), experts) for name, tensor in tensors.items()))


def local_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What lies on this rank, by the same names: what a transfer reads."""
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def _entry(name: str, tensor: torch.Tensor, rank: int) -> LayoutEntry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not isinstance(tensor, DTensor):
        return LayoutEntry(name, tuple(tensor.shape), dtype, Mesh(("rank",), (1,), (rank,)), (Replicate(),))
    grid = tensor.device_mesh
    names = grid.mesh_dim_names or tuple(f"axis{i}" for i in range(grid.ndim))
    ranks = tuple(int(r) for r in grid.mesh.flatten().tolist())
    mesh = Mesh(tuple(names), tuple(grid.mesh.shape), ranks)
    places = tuple(_place(name, p) for p in tensor.placements)
    return LayoutEntry(name, tuple(tensor.shape), dtype, mesh, places, order=_order(tensor.placements))


def _place(name: str, placement: Placement) -> Place:
    if isinstance(placement, TorchShard | _StridedShard):
        return Shard(placement.dim)
    if isinstance(placement, TorchReplicate):
        return Replicate()
    raise ReshardError(
        f"{name} is placed as {placement}: its values are not known before a reduction",
        "publish parameters, not partial sums",
    )


def _order(placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Axes in the order in which they cut. A strided shard is cut last: FSDP cuts what tensor parallelism left."""
    strided = [i for i, p in enumerate(placements) if isinstance(p, _StridedShard)]
    if not strided:
        return ()
    return (*(i for i in range(len(placements)) if i not in strided), *reversed(strided))


def _with_expert(entry: LayoutEntry, experts: int) -> LayoutEntry:
    found = EXPERT.match(entry.name)
    if found is None or not experts:
        return entry
    index, shape = int(found["index"]), entry.shape
    part = Part((index, *(0 for _ in shape)), (1, *shape), (0,) * len(shape), shape)
    return LayoutEntry(
        f"{found['before']}.{found['after']}", (experts, *shape), entry.dtype, entry.mesh, entry.places,
        entry.name, entry.order, part,
    )  # fmt: skip
