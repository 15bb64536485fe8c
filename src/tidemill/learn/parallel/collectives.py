"""Collectives over one dimension of the mesh, each known to the flight log, and their differentiable forms over tokens.

| function | forward | backward |
|---|---|---|
| gather_tokens | all-gather | reduce-scatter: each rank adds its part of the gradient |
| scatter_tokens | reduce-scatter: parts of a sum, each rank keeps its tokens | all-gather |
| copy_tokens | all-gather | own tokens: every rank has the whole gradient |
| keep_tokens | own tokens: every rank has the whole | all-gather |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tidemill.device import plain
from tidemill.learn.parallel.flight import Flight
from tidemill.learn.parallel.mesh import Meshes, key_holders

Group = Any  # torch.distributed.ProcessGroup
# Newer torch has new names for these.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True)
class MeshLink:
    """The ranks along one dimension, as this one sees them."""

    name: str
    group: Group
    ranks: Sequence[int]
    rank: int  # among them
    flight: Flight

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_gather(self, x: Tensor) -> Tensor:
        """(n, …) → (size · n, …)."""
        x = x.contiguous()
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with self.flight.entered("all-gather", self.name, x, self.ranks):
            all_gather(out, x, group=self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """(size · n, …) → (n, …), the sum."""
        x = x.contiguous()
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        with self.flight.entered("reduce-scatter", self.name, x, self.ranks):
            reduce_scatter(out, x, group=self.group)
        return out

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """In place."""
        if self.size > 1 and x.numel():
            with self.flight.entered("all-reduce", self.name, x, self.ranks):
                dist.all_reduce(x, op=op, group=self.group)
        return x

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """send[r] rows to rank r, receive[r] rows from it, in the order of ranks."""
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        with self.flight.entered("all-to-all", self.name, rows[:0], self.ranks):  # every rank has its own sizes
            dist.all_to_all_single(out, rows.contiguous(), list(receive), list(send), group=self.group)
        return out

    def wait(self, operation: str, x: Tensor, works: Sequence[Any]) -> None:
        """For messages under way."""
        with self.flight.entered(operation, self.name, x[:0], self.ranks):
            for work in works:
                work.wait()

    def gather_plain(self, value: Any) -> list[Any]:
        """Small plain values of every rank, in order of rank; see `plain.gather`."""
        if self.size == 1:
            return [value]
        with self.flight.entered("gather of values", self.name, torch.empty(0), self.ranks):
            return plain.gather(value, self.size, self.group)

    def chunk(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's equal part."""
        return x.chunk(self.size, dim)[self.rank]


def link(mesh: DeviceMesh, flight: Flight) -> MeshLink:
    """Of a mesh with one dimension."""
    name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "ranks"
    return MeshLink(
        name, mesh.get_group(), [int(r) for r in mesh.mesh.flatten().tolist()], mesh.get_local_rank(), flight
    )


def world(flight: Flight) -> MeshLink:
    return MeshLink("world", dist.group.WORLD, range(dist.get_world_size()), dist.get_rank(), flight)


def make_links(meshes: Meshes, flight: Flight, kv_heads: int) -> dict[str, MeshLink]:
    """By name: the dimensions over which this rank exchanges something itself. FSDP has its own. One device exchanges
    nothing with nobody."""
    if meshes.made is None:
        return {name: MeshLink(name, None, (0,), 0, flight) for name in ("world", "dp")}
    links = {"world": world(flight), "dp": link(meshes.made.dp, flight)}
    for name, mesh in (("cp", meshes.cp), ("ep", meshes.ep), ("pp", meshes.pp)):
        if mesh is not None:
            links[name] = link(mesh, flight)
    if meshes.tp is not None:
        links["tp"] = link(meshes.tp, flight)
        if 0 < kv_heads < meshes.tp.size():
            links["kv"] = link(key_holders(meshes, kv_heads), flight)
    return links


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: MeshLink, sums: bool) -> Tensor:
        ctx.over, ctx.sums = over, sums
        return over.all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.over.reduce_scatter(grad) if ctx.sums else ctx.over.chunk(grad)), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: MeshLink, sums: bool) -> Tensor:
        ctx.over = over
        return over.reduce_scatter(x) if sums else over.chunk(x).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.over.all_gather(grad), None, None


def gather_tokens(x: Tensor, over: MeshLink) -> Tensor:
    """(own tokens, …) → (tokens, …)."""
    return _Gather.apply(x, over, True)  # type: ignore[no-any-return, no-untyped-call]


def copy_tokens(x: Tensor, over: MeshLink) -> Tensor:
    return _Gather.apply(x, over, False)  # type: ignore[no-any-return, no-untyped-call]


def scatter_tokens(x: Tensor, over: MeshLink) -> Tensor:
    """(tokens, …), a part of a sum → (own tokens, …), the sum."""
    return _Scatter.apply(x, over, True)  # type: ignore[no-any-return, no-untyped-call]


def keep_tokens(x: Tensor, over: MeshLink) -> Tensor:
    return _Scatter.apply(x, over, False)  # type: ignore[no-any-return, no-untyped-call]
