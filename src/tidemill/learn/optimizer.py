"""Optimizers and learning-rate schedules, as functions of the recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from tidemill.config import Learn


def make_optimizer(parameters: Iterable[torch.nn.Parameter], learn: Learn) -> torch.optim.Optimizer:
    """Vectors (norms, biases) are not decayed: pulling a norm's gain to zero only hurts."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": learn.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=learn.lr, betas=learn.betas, eps=learn.eps, fused=True)


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
