"""Optimizers and learning-rate schedules, as functions of the recipe."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from tidemill.learn.optim.adam import Adam, Gradient
from tidemill.learn.optim.muon import MatrixRanks, Muon

if TYPE_CHECKING:
    from tidemill.recipe.config import Learn


def optimizer_of(
    trained: Sequence[Parameter],
    inner: Container[int],
    learn: Learn,
    gradient: Gradient,
    shared: MatrixRanks | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Vectors (norms, biases) are not decayed: pulling a norm's gain to zero only hurts. `inner`: ids of the layers'
    matrices, which are Muon's, and `shared` the ranks that have pieces of them. `seed`: of rounding by chance."""
    is_muon = learn.optimizer == "muon"
    matrices = [p for p in trained if is_muon and id(p) in inner]
    others = [p for p in trained if p.ndim >= 2 and not (is_muon and id(p) in inner)]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": learn.weight_decay, "is_matrix": True},
        {"params": others, "weight_decay": learn.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if not is_muon and learn.master == "none" and learn.moments == "same" and not learn.optimizer_on_host:
        return torch.optim.AdamW(groups, lr=learn.lr, betas=learn.betas, eps=learn.eps, fused=True)
    settings: dict[str, Any] = {"lr": learn.lr, "betas": learn.betas, "eps": learn.eps, "gradient": gradient}
    settings |= {"master": learn.master, "moments": "int8" if learn.moments == "int8" else "float32"}
    settings |= {"on_host": learn.optimizer_on_host, "seed": seed}
    return Muon(groups, shared=shared, **settings) if is_muon else Adam(groups, **settings)


def state_home(optimizer: torch.optim.Optimizer, p: torch.Tensor, key: str) -> torch.device:
    """Where a piece of the optimizer's state lives."""
    return optimizer.home(p, key) if isinstance(optimizer, Adam) else p.device


def placed(optimizer: torch.optim.Optimizer, p: torch.Tensor, key: str, value: torch.Tensor) -> torch.Tensor:
    """A copy of a piece of the optimizer's state, where it lives."""
    if isinstance(optimizer, Adam) and optimizer.on_host and p.device.type != "cpu" and key != "step":
        return optimizer.host.like(value).copy_(value)  # pinned
    return value.clone().to(state_home(optimizer, p, key))


def plain_state(optimizer: torch.optim.Optimizer, p: Parameter) -> dict[str, torch.Tensor]:
    """Of one parameter, in a form that any cut of it can take up: a value for each of its own, or one for all."""
    kept = optimizer.plain(p) if isinstance(optimizer, Adam) else optimizer.state.get(p, {})
    return {key: torch.as_tensor(value).detach() for key, value in kept.items()}


def restored(optimizer: torch.optim.Optimizer, p: Parameter, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the optimizer keeps for one parameter, from a checkpoint's: as it was kept, or as `plain_state` told it."""
    made = optimizer.coded(p, given) if isinstance(optimizer, Adam) else given
    return {key: placed(optimizer, p, key, value) for key, value in made.items()}


def learning_rate(learn: Learn, update: int, total: int) -> float:
    """Of the update with index `update` out of `total`."""
    if update < learn.warmup_steps:
        return learn.lr * (update + 1) / learn.warmup_steps
    done = (update - learn.warmup_steps) / max(1, total - learn.warmup_steps)
    match learn.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = max(0.0, 1.0 - done)
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return learn.lr * (learn.min_lr_share + (1 - learn.min_lr_share) * share)
