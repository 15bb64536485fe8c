"""Optimizers and learning-rate schedules, as functions of the recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tidemill.learn.adam import Adam
from tidemill.learn.gradients import Gradients

if TYPE_CHECKING:
    from tidemill.config import Learn


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], learn: Learn, gradients: Gradients
) -> torch.optim.Optimizer:
    """Vectors (norms, biases) are not decayed: pulling a norm's gain to zero only hurts."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": learn.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if learn.master == "none" and learn.moments == "same" and not learn.optimizer_on_host:
        return torch.optim.AdamW(groups, lr=learn.lr, betas=learn.betas, eps=learn.eps, fused=True)
    return Adam(
        groups,
        lr=learn.lr,
        betas=learn.betas,
        eps=learn.eps,
        gradient=gradients.of,
        master=learn.master,
        moments="int8" if learn.moments == "int8" else "float32",
        on_host=learn.optimizer_on_host,
    )


def state_home(optimizer: torch.optim.Optimizer, p: torch.Tensor, key: str) -> torch.device:
    """Where a piece of the optimizer's state lives."""
    return optimizer.home(p, key) if isinstance(optimizer, Adam) else p.device


def learning_rate(learn: Learn, update: int, total: int) -> float:
    """Of the update with index `update` out of `total`."""
    if update < learn.warmup_steps:
        return learn.lr * (update + 1) / learn.warmup_steps
    done = (update - learn.warmup_steps) / max(1, total - learn.warmup_steps)
    match learn.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = 1.0 - done
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return learn.lr * (learn.min_lr_share + (1 - learn.min_lr_share) * share)
