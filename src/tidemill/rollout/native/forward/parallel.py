"""Tensor parallelism for the lean forward pass: each rank computes its heads and its share of the gated layer and the
output layer. Of a mixture's experts each rank has some, and computes them for all tokens that chose them.

Every rank gets the same requests in the same order. Its scheduler then decides the same; sums and gathers give all
ranks the same logits, and random numbers are hashes, so all ranks draw the same tokens and exchange nothing else.
A rank may hold the whole model, and reads its share of the parameters where they lie; or, after `cut`, its share alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.errors import ModelError
from tidemill.models.attention.registry import Context
from tidemill.models.mixture.experts import STACKS
from tidemill.models.vision.eyes.eyes import Seen
from tidemill.reshard.layouts.layout import Layout, LayoutEntry, Mesh, Place, Replicate, Shape, Shard
from tidemill.rollout.native.forward import mixture
from tidemill.rollout.native.forward.lean import Gated, LeanRunner, Weight, _Layer
from tidemill.rollout.native.forward.mixture import Mixture
from tidemill.rollout.native.kernels import Kernels

Group = Any  # torch.distributed.ProcessGroup, which type checkers do not know on every platform
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")  # a rank makes some of the outputs
COLUMNS = ("o_proj", "down_proj")  # a rank takes some of the inputs
EXPERTS = tuple(f".experts.{stack}" for stack in STACKS)  # a rank has some of the experts


def check_divides(model: Any, ranks: int) -> None:
    """Heads, gated layers and experts must be cut evenly; of the vocabulary the last rank may have less."""
    parts = {"key/value heads": model.config.get_text_config().num_key_value_heads}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "down_proj" and isinstance(module, nn.Linear):
            parts["intermediate size"] = module.in_features
        elif last == "gate" and hasattr(module, "top_k"):
            parts["number of experts"] = module.weight.shape[0]
    for name, size in parts.items():
        if size % ranks:
            raise ModelError(
                f"{ranks} tensor-parallel ranks do not divide the model's {name} of {size}",
                f"use a number of ranks that divides {', '.join(str(n) for n in parts.values())}",
            )


# Holding a share alone


def places(model: Any) -> dict[str, tuple[Shape, Place]]:
    """Of every parameter: its shape in the whole model, and how ranks cut it. A linear layer knows its whole size also
    after it was cut; an output layer that is the embedding is not cut."""
    tied = model.get_input_embeddings().weight
    found: dict[str, tuple[Shape, Place]] = {}
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, p in model.named_parameters():
        where, _, kind = name.rpartition(".")
        linear, last = linears.get(where), where.rpartition(".")[2]
        if name.endswith(EXPERTS):
            experts = model.get_submodule(where.rpartition(".")[0]).gate.weight.shape[0]
            found[name] = ((experts, *p.shape[1:]), Shard(0))
            continue
        if linear is None or p is tied or last not in (*ROWS, *COLUMNS):
            found[name] = (tuple(p.shape), Replicate())
            continue
        whole = (linear.out_features, linear.in_features) if kind == "weight" else (linear.out_features,)
        by_rows = last in ROWS
        found[name] = (whole, Shard(0) if by_rows else Shard(1) if kind == "weight" else Replicate())
    return found


def cut(model: Any, rank: int, ranks: int) -> None:
    """Leave a rank's share of the parameters, in memory of its own. On the meta device, before there is any memory."""
    check_divides(model, ranks)
    for name, (shape, place) in places(model).items():
        if not isinstance(place, Shard):
            continue
        where, _, kind = name.rpartition(".")
        low, high = place.cut(0, shape[place.dim], rank, ranks)
        whole = getattr(model.get_submodule(where), kind)
        own = whole.detach().narrow(place.dim, low, high - low).clone(memory_format=torch.contiguous_format)
        setattr(model.get_submodule(where), kind, nn.Parameter(own, requires_grad=whole.requires_grad))


def layout(model: Any, ranks: Sequence[int]) -> Layout:
    """How the shares lie over `ranks`, for whoever brings new weights."""
    mesh = Mesh(("tp",), (len(ranks),), tuple(ranks))
    dtypes = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()}
    return Layout(
        tuple(LayoutEntry(n, shape, dtypes[n], mesh, (place,)) for n, (shape, place) in places(model).items())
    )


@torch.no_grad()
def gathered(model: Any, group: Group) -> dict[str, Tensor]:
    """The whole model in the host's memory of the first rank, tensor by tensor; nothing on the others. All call it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    whole: dict[str, Tensor] = {}
    own = dict(model.named_parameters())
    for name, (shape, place) in places(model).items():
        tensor = own[name].detach()
        if isinstance(place, Shard):
            step = -(-shape[place.dim] // ranks)
            parts = [torch.empty_like(_filled(tensor, place.dim, step)) for _ in range(ranks)]
            dist.all_gather(parts, _filled(tensor, place.dim, step).contiguous(), group=group)
            tensor = torch.cat(parts, place.dim).narrow(place.dim, 0, shape[place.dim])
        if rank == 0:
            whole[name] = tensor.cpu().clone()
    return whole


def _filled(tensor: Tensor, dim: int, length: int) -> Tensor:
    """Up to the length that all ranks' parts have."""
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros([missing if i == dim else n for i, n in enumerate(tensor.shape)])], dim)


# Computing


class SomeExperts:
    """Experts `low` to `high` of a stack, read where they lie."""

    def __init__(self, module: Any, low: int, high: int) -> None:
        self.module, self.own = module, slice(low, high)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        return found[self.own] if name in STACKS else found


class ParallelRunner(LeanRunner):
    def __init__(self, model: Any, max_len: int, kernels: Kernels | None, group: Group) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        check_divides(model, self.ranks)
        self.vocabulary = int(model.get_output_embeddings().out_features)
        super().__init__(model, max_len, kernels)

    def bind(self) -> None:
        super().bind()
        first = self.model.get_decoder().layers[0].self_attn.q_proj
        if first.weight.shape[0] == first.out_features:
            self.layers = [self._share(layer) for layer in self.layers]
        else:
            self.layers = [self._own_part(layer) for layer in self.layers]
        if self.head[0].shape[0] == self.vocabulary:  # whole: also where it is the embedding of a model that is cut
            self.head = self._rows(self.head)

    def _share(self, layer: _Layer) -> _Layer:
        split: dict[str, Any] = {name: self._rows(getattr(layer, name)) for name in ("q", "k", "v")}
        w = layer.mlp
        mlp = (
            self._share_experts(w)
            if isinstance(w, Mixture)
            else Gated(self._rows(w.gate), self._rows(w.up), self._columns(w.down))
        )
        return replace(layer, o=self._columns(layer.o), mlp=mlp, **split)

    def _share_experts(self, w: Mixture) -> Mixture:
        """Of a layer that is here whole: this rank's experts, and its part of the shared one."""
        low, high = Shard(0).cut(0, w.gate.weight.shape[0], self.rank, self.ranks)
        shared = w.shared
        if shared is not None:
            gate, up = self._rows((shared.gate, None))[0], self._rows((shared.up, None))[0]
            shared = replace(shared, gate=gate, up=up, down=self._columns((shared.down, None))[0])
        return replace(w, module=SomeExperts(w.module, low, high), first=low, shared=shared)

    def _own_part(self, layer: _Layer) -> _Layer:
        """Of a layer that was cut. Parts are summed over ranks, so only the first adds a bias."""
        w = layer.mlp
        if isinstance(w, Mixture):
            low, _ = Shard(0).cut(0, w.gate.weight.shape[0], self.rank, self.ranks)
            layer = replace(layer, mlp=replace(w, first=low))
        elif self.rank:
            layer = replace(layer, mlp=replace(w, down=(w.down[0], None)))
        return replace(layer, o=(layer.o[0], None)) if self.rank else layer

    def _rows(self, linear: Weight) -> Weight:
        """The part of a linear layer that makes this rank's outputs."""
        weight, bias = linear
        own = slice(*Shard(0).cut(0, weight.shape[0], self.rank, self.ranks))
        return weight[own], None if bias is None else bias[own]

    def _columns(self, linear: Weight) -> Weight:
        """The part that takes this rank's inputs."""
        weight, bias = linear
        return weight.chunk(self.ranks, 1)[self.rank], bias if self.rank == 0 else None

    def _add(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = F.linear(x, weight, bias)
        dist.all_reduce(out, group=self.group)
        return out.add_(residual)

    def _feed_forward(self, x: Tensor, h: Tensor, w: Gated | Mixture, context: Context) -> Tensor:
        if not isinstance(w, Mixture):
            return super()._feed_forward(x, h, w, context)
        out = mixture.forward(w, h, context)
        dist.all_reduce(out, group=self.group)
        return out.add_(x)

    def forward(
        self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None, seen: Seen | None = None
    ) -> Tensor:
        step = -(-self.vocabulary // self.ranks)
        mine = _filled(super().forward(ids, positions, context, keep, seen), 1, step).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(parts, mine, group=self.group)
        return torch.cat(parts, 1)[:, : self.vocabulary]
