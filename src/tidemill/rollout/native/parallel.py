"""Tensor parallelism for the lean forward pass: each rank computes its heads and its share of the gated layer and the
output layer.

Every rank gets the same requests in the same order. Its scheduler then decides the same; sums and gathers give all
ranks the same logits, and random numbers are hashes, so all ranks draw the same tokens and exchange nothing else.
A rank reads its share of the module's parameters where they lie, so that in-place updates need no copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tidemill.errors import ModelError
from tidemill.models.attention import Context
from tidemill.rollout.native.kernels import Kernels
from tidemill.rollout.native.lean import LeanRunner, Weight, _Layer

Group = Any  # torch.distributed.ProcessGroup, which type checkers do not know on every platform


def check_divides(config: Any, ranks: int) -> None:
    """Heads, the gated layer and the vocabulary must be cut evenly."""
    parts = {
        "key/value heads": config.num_key_value_heads,
        "intermediate size": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    for name, size in parts.items():
        if size % ranks:
            raise ModelError(
                f"{ranks} tensor-parallel ranks do not divide the model's {name} of {size}",
                f"use a number of ranks that divides {', '.join(str(n) for n in parts.values())}",
            )


class ParallelRunner(LeanRunner):
    def __init__(self, model: Any, max_len: int, kernels: Kernels | None, group: Group) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        check_divides(model.config, self.ranks)
        super().__init__(model, max_len, kernels)

    def bind(self) -> None:
        super().bind()
        self.layers = [self._share(layer) for layer in self.layers]
        self.head = self._rows(self.head)

    def _share(self, layer: _Layer) -> _Layer:
        split: dict[str, Any] = {name: self._rows(getattr(layer, name)) for name in ("q", "k", "v", "gate", "up")}
        split |= {name: self._columns(getattr(layer, name)) for name in ("o", "down")}
        return replace(layer, **split)

    def _rows(self, linear: Weight) -> Weight:
        """The part of a linear layer that makes this rank's outputs."""
        weight, bias = linear
        return weight.chunk(self.ranks)[self.rank], None if bias is None else bias.chunk(self.ranks)[self.rank]

    def _columns(self, linear: Weight) -> Weight:
        """The part that takes this rank's inputs. Parts are summed over ranks, so only one adds the bias."""
        weight, bias = linear
        return weight.chunk(self.ranks, 1)[self.rank], bias if self.rank == 0 else None

    def _add(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = F.linear(x, weight, bias)
        dist.all_reduce(out, group=self.group)
        return out.add_(residual)

    def forward(self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None) -> Tensor:
        mine = super().forward(ids, positions, context, keep)
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(parts, mine.contiguous(), group=self.group)
        return torch.cat(parts, 1)
