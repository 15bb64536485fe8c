"""One mesh of named dimensions for a learner's ranks, and the sub-meshes that each form of parallelism works on.

Order, slowest first: pp, replicate, fsdp, cp, tp. Neighbouring ranks share a tensor-parallel group, whose traffic is
the heaviest; pipeline stages, which speak least, lie furthest apart.

| who | gets |
|---|---|
| ranks that differ in replicate or fsdp | different samples |
| ranks that differ in cp | different tokens of the same samples |
| ranks that differ in tp or pp | the same tokens |

Weights are sharded over fsdp × cp (`shard`), for both are ranks whose gradients add up. Expert parallelism is folded
over those same ranks: `ep` divides fsdp × cp, its ranks are neighbours in `shard`, and what is left (`efsdp`) shards
each expert rank's experts. So a rank's experts differ along ep, and everything else stays where it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tidemill.errors import ConfigError
from tidemill.recipe.config import ParallelSettings
from tidemill.recipe.ranks import world_problem

DIMENSIONS = ("pp", "replicate", "fsdp", "cp", "tp")
SHARD, EFSDP, EP, DP = "shard", "efsdp", "ep", "dp"


@dataclass(frozen=True)
class RankMeshes:
    """The meshes of a world that is up."""

    mesh: DeviceMesh  # of all ranks, DIMENSIONS
    sharded: DeviceMesh  # of all ranks: pp, replicate, shard, tp
    experts: DeviceMesh  # of all ranks: pp, replicate, efsdp, ep, tp
    dp: DeviceMesh  # replicate × fsdp: the ranks with different samples that are otherwise like this one

    def of(self, name: str) -> DeviceMesh:
        mesh = self.mesh if name in DIMENSIONS else self.sharded if name == SHARD else self.experts
        return mesh[name]


@dataclass(frozen=True)
class Meshes:
    """A sub-mesh is None where its dimension has one rank: nothing is cut, so nothing need be said. On one device
    there is no mesh at all, and no torch.distributed world."""

    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    made: RankMeshes | None = None

    def _one(self, name: str) -> DeviceMesh | None:
        if self.made is None:
            return None
        found = self.made.of(name)
        return found if found.size() > 1 else None

    def grid(self, is_expert: bool) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
        """Names, sizes and ranks of the dimensions over which a parameter lies, those of one pipeline stage."""
        names: tuple[str, ...] = ("replicate", EFSDP, EP, "tp") if is_expert else ("replicate", SHARD, "tp")
        if self.made is None:
            return names, (1,) * len(names), (0,)
        mesh = (self.made.experts if is_expert else self.made.sharded)[names]
        return names, tuple(mesh.mesh.shape), tuple(int(r) for r in mesh.mesh.flatten().tolist())

    @cached_property
    def pp(self) -> DeviceMesh | None:
        return self._one("pp")

    @cached_property
    def replicate(self) -> DeviceMesh | None:
        return self._one("replicate")

    @cached_property
    def fsdp(self) -> DeviceMesh | None:
        return self._one("fsdp")

    @cached_property
    def cp(self) -> DeviceMesh | None:
        return self._one("cp")

    @cached_property
    def tp(self) -> DeviceMesh | None:
        return self._one("tp")

    @cached_property
    def shard(self) -> DeviceMesh | None:
        """fsdp × cp: the ranks among which each weight lies in pieces."""
        return self._one(SHARD)

    @cached_property
    def ep(self) -> DeviceMesh | None:
        return self._one(EP)

    @cached_property
    def efsdp(self) -> DeviceMesh | None:
        """What is left of fsdp × cp once ep has its ranks: they shard each expert."""
        return self._one(EFSDP)

    @cached_property
    def data(self) -> DeviceMesh | None:
        """For `fully_shard`: (replicate, shard), or shard alone; None where no weight lies in pieces. Copies alone need
        no FSDP: their gradients are added up once per update (`learn.gradients`)."""
        if self.made is not None and self.shard is not None and self.replicate is not None:
            return self.made.sharded["replicate", SHARD]
        return self.shard

    @cached_property
    def expert_data(self) -> DeviceMesh | None:
        """The same for experts, whose shards lie over efsdp."""
        if self.made is not None and self.shard is not None and self.replicate is not None:
            return self.made.experts["replicate", EFSDP]
        return self.efsdp

    def coordinate(self, name: str) -> int:
        """This rank's place along a dimension."""
        return 0 if self.made is None else self.made.of(name).get_local_rank()

    @property
    def dp_size(self) -> int:
        """Ranks, counted once per cp, tp and pp group, that get different samples."""
        return self.parallel.replicate * self.parallel.fsdp

    @property
    def dp_rank(self) -> int:
        return self.coordinate("replicate") * self.parallel.fsdp + self.coordinate("fsdp")

    @property
    def rank(self) -> int:
        return 0 if self.made is None else dist.get_rank()

    @property
    def computes_alone(self) -> bool:
        """Whether a forward and backward pass exchanges nothing: ranks, if there are several, are copies."""
        return self.parallel.ranks == self.parallel.replicate

    def __str__(self) -> str:
        sizes = {name: getattr(self.parallel, name) for name in (*DIMENSIONS, EP)}
        return " × ".join(f"{name} {n}" for name, n in sizes.items() if n > 1) or "one rank"


def build(parallel: ParallelSettings, device_type: str = "cpu") -> Meshes:
    """For one device, or for a rank of a torch.distributed world that is up; every rank of it calls this, with the same
    `parallel`.

    Models of the same sizes share one mesh: each of its groups has threads, connections and buffers of its own."""
    problem = world_problem(parallel, dist.get_world_size() if dist.is_initialized() else 1)
    if problem:
        raise ConfigError(problem)
    if parallel.ranks == 1:
        return Meshes(parallel)
    if _made.world is not dist.group.WORLD:
        _made.world, _made.meshes, _made.key_holders = dist.group.WORLD, {}, {}
    sizes = tuple(getattr(parallel, name) for name in (*DIMENSIONS, EP, "timeout_s"))
    key = (device_type, *sizes)
    if key not in _made.meshes:
        _made.meshes[key] = _make(parallel, device_type)
    return Meshes(parallel, _made.meshes[key])


@dataclass
class _Made:
    """Meshes of the world that is up; those of another are gone with it."""

    world: Any = None
    meshes: dict[tuple[Any, ...], RankMeshes] = field(default_factory=dict)
    key_holders: dict[tuple[int, int], DeviceMesh] = field(default_factory=dict)


_made = _Made()


def key_holders(meshes: Meshes, kv_heads: int) -> DeviceMesh:
    """Where there are fewer key heads than tensor-parallel ranks: those that hold the same one."""
    assert meshes.tp is not None
    key = (id(meshes.made), kv_heads)
    if key not in _made.key_holders:
        folded = meshes.tp._unflatten(0, (kv_heads, meshes.tp.size() // kv_heads), ("kv_head", "kv"))
        _made.key_holders[key] = folded["kv"]
    return _made.key_holders[key]


def _make(parallel: ParallelSettings, device_type: str) -> RankMeshes:
    sizes = tuple(getattr(parallel, name) for name in DIMENSIONS)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)
    shard = parallel.fsdp * parallel.cp
    # One root for all of them, made by folding: torch composes sharded tensors only over meshes of one root.
    flat = mesh["fsdp", "cp"]._flatten(SHARD)
    sharded = DeviceMesh._concatenate([mesh["pp"], mesh["replicate"], flat, mesh["tp"]])
    folded = flat._unflatten(0, (shard // parallel.ep, parallel.ep), (EFSDP, EP))
    experts = DeviceMesh._concatenate([mesh["pp"], mesh["replicate"], folded[EFSDP], folded[EP], mesh["tp"]])
    dp = mesh["replicate", "fsdp"]._flatten(DP)
    _set_timeouts((mesh, sharded, experts, dp), parallel.timeout_s)
    return RankMeshes(mesh, sharded, experts, dp)


def _set_timeouts(meshes: tuple[DeviceMesh, ...], timeout_s: float) -> None:
    """Groups of a mesh are made with their backend's own time-out, half an hour for gloo."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    for group in {g for m in meshes for g in m.get_all_groups()}:
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
