"""How every parameter lies over the mesh: one table, from which follow the layout, checkpoints, norms and sums.

Tensor and expert parallelism leave each rank plain tensors of its own part; FSDP shards those. The table remembers
what they are parts of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tidemill.learn.parallel.mesh import Meshes
from tidemill.models.buffers import persistent
from tidemill.reshard.layouts.layout import Layout, LayoutEntry, Mesh, Place, Replicate, Shape, Shard

Adds = Literal["", "tp", "kv", "ends"]
WHOLE = Replicate()


@dataclass(frozen=True, slots=True)
class Cut:
    shape: Shape  # in the whole model
    place: Place = WHOLE  # over tp
    adds: Adds = ""  # ranks whose gradients of it are parts of a sum, beside those of the data mesh
    is_expert: bool = False  # cut over ep along its first dimension, and sharded over efsdp
    shard_dim: int = 0  # what FSDP cuts


Cuts = dict[str, Cut]


def whole(model: Any) -> Cuts:
    """Before anything is cut."""
    return {name: Cut(tuple(p.shape)) for name, p in model.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    """What lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def narrow(tensor: Tensor, place: Place, coordinate: int, size: int) -> Tensor:
    """This rank's part along one dimension of the mesh, in memory of its own."""
    if not isinstance(place, Shard):
        return tensor
    low, high = place.cut(0, tensor.shape[place.dim], coordinate, size)
    return tensor.narrow(place.dim, low, high - low).clone()


def replace_parameter(module: Any, name: str, tensor: Tensor) -> Parameter:
    old = getattr(module, name)
    new = Parameter(tensor.detach(), requires_grad=old.requires_grad)
    setattr(module, name, new)
    return new


def copies(cut: Cut, meshes: Meshes) -> int:
    """How many ranks of a pipeline stage hold the same element."""
    parallel = meshes.parallel
    held = parallel.replicate
    if isinstance(cut.place, Replicate):
        held *= parallel.tp
    elif cut.place.parts:
        held *= parallel.tp // cut.place.parts
    return 2 * held if cut.adds == "ends" else held  # a tied weight lies on the first and on the last stage


def entry(name: str, cut: Cut, dtype: torch.dtype, meshes: Meshes) -> LayoutEntry:
    """One parameter as the weight flow and checkpoints speak of it."""
    names, sizes, ranks = meshes.grid(cut.is_expert)
    if cut.is_expert:
        places: tuple[Place, ...] = (Replicate(), Shard(cut.shard_dim), Shard(0), cut.place)
        order: tuple[int, ...] = (0, 2, 3, 1)  # FSDP cuts what the others left
    else:
        places, order = (Replicate(), Shard(cut.shard_dim), cut.place), (0, 2, 1)
    if meshes.shard is None:  # a number by itself has no dimension to cut
        places = (*(WHOLE for _ in places[:-1]), cut.place) if not cut.is_expert else places
    mesh = Mesh(names, sizes, ranks)
    return LayoutEntry(name, cut.shape, str(dtype).removeprefix("torch."), mesh, places, order=order)


def layout(model: Any, cuts: Mapping[str, Cut], meshes: Meshes) -> Layout:
    """Of this rank's pipeline stage."""
    own = [entry(name, cuts[name], p.dtype, meshes) for name, p in model.named_parameters()]
    return Layout((*own, *(_everywhere(name, buffer, meshes) for name, buffer in persistent(model).items())))


def _everywhere(name: str, buffer: Tensor, meshes: Meshes) -> LayoutEntry:
    """What every rank has whole."""
    one = entry(name, Cut(tuple(buffer.shape)), buffer.dtype, meshes)
    return replace(one, places=(WHOLE,) * len(one.places))


def renamed(layout: Layout, role: str) -> Layout:
    """As another role's, beside the learner's own: `critic.`."""
    return Layout(tuple(replace(one, name=f"{role}{one.name}") for one in layout.entries))


def elements(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
