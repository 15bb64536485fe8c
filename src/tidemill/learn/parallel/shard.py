"""FSDP2 over a model that tensor, expert and pipeline parallelism have already cut.

Each decoder layer is gathered just before it runs and let go after, in both directions; the next one's gather runs
meanwhile. Gradients are summed, not averaged: a loss here is a sum, divided once at the end of the update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard as TorchShard
from torch.nn import Parameter

from tidemill.learn.parallel.collectives import Group, all_gather, reduce_scatter
from tidemill.learn.parallel.cuts import Cuts
from tidemill.learn.parallel.flight import Flight
from tidemill.learn.parallel.mesh import Meshes
from tidemill.models.parts import layers_of
from tidemill.recipe.config import Learn

DTYPES = {"same": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
AHEAD = 1  # layers gathered before their turn


def apply(root: torch.nn.Module, model: Any, cuts: Cuts, meshes: Meshes, learn: Learn, flight: Flight) -> Cuts:
    """`root` is what is called; its forward must run the model's decoder and call its head."""
    if meshes.data is None:
        return cuts
    done = _cut_inside_experts(model, cuts, meshes)
    policy = MixedPrecisionPolicy(reduce_dtype=DTYPES[learn.reduce_dtype])
    names = {id(p): name for name, p in model.named_parameters()}

    def where(p: Parameter) -> TorchShard:
        return TorchShard(done[names[id(p)]].shard_dim)

    # Experts of which no other rank has a piece or a copy are complete as they are.
    whole = {p for name, p in model.named_parameters() if done[name].is_expert and meshes.expert_data is None}

    def wrap(module: torch.nn.Module, mesh: Any = meshes.data) -> Any:
        return fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            shard_placement_fn=where,
            reshard_after_forward=True,
            ignored_params=whole or None,
        )

    layers = [layer for layer in layers_of(model) if any(True for _ in layer.parameters())]  # those of this stage
    for layer in layers:
        if meshes.expert_data is not None:
            for module in _expert_modules(layer, names, done):
                wrap(module, meshes.expert_data)
        wrap(layer)
    for module in _ends(model):
        wrap(module)
    wrap(root)
    _sum_and_prefetch(root, layers, flight)
    return done


def _ends(model: Any) -> list[torch.nn.Module]:
    """Embedding and head each by itself; tied, they are one parameter and belong to the root."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = [getattr(m, "weight", None) for m in ends]  # None: another pipeline stage has it, or there is none
    return [] if weights[0] is weights[1] else [m for m, weight in zip(ends, weights) if weight is not None]


def _expert_modules(layer: Any, names: dict[int, str], cuts: Cuts) -> list[torch.nn.Module]:
    """Modules whose parameters lie over ep: they are sharded over what is left of the ranks."""
    found = []
    for module in layer.modules():
        own = [names.get(id(p)) for p in module.parameters(recurse=False)]
        if own and all(name is not None and cuts[name].is_expert for name in own):
            found.append(module)
    return found


def _cut_inside_experts(model: Any, cuts: Cuts, meshes: Meshes) -> Cuts:
    """Stacked experts are cut along their rows where these divide: by experts, few of them would leave ranks empty."""
    done = dict(cuts)
    for name, p in model.named_parameters():
        cut = done[name]
        mesh = meshes.efsdp if cut.is_expert else meshes.shard
        # An adapter's A goes by the stack it belongs to, which comes before it: where that is cut by experts, so is A.
        if name.endswith("_lora_a") and p.ndim == 3 and not done[name.removesuffix("_lora_a")].shard_dim:
            continue
        if p.ndim == 3 and mesh is not None and p.shape[0] % mesh.size() and p.shape[1] % mesh.size() == 0:
            done[name] = replace(cut, shard_dim=1)
    return done


def _sum_and_prefetch(root: torch.nn.Module, layers: list[Any], flight: Flight) -> None:
    gather, scatter = LoggedGather(flight), LoggedScatter(flight)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + AHEAD])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - AHEAD) : i][::-1])


# FSDP's own exchanges, known to the flight log


@dataclass(frozen=True, slots=True)
class LoggedGather:
    flight: Flight

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False) -> Any:
        members = dist.get_process_group_ranks(group)
        with self.flight.entered("all-gather of weights", _name(members), input_tensor, members):
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


@dataclass(frozen=True, slots=True)
class LoggedScatter:
    flight: Flight

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Any:
        members = dist.get_process_group_ranks(group)
        with self.flight.entered("reduce-scatter of gradients", _name(members), input_tensor, members):
            return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def _name(members: list[int]) -> str:
    return f"shard of {len(members)} ranks"
