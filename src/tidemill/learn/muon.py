"""Muon (Jordan et al. 2024): the layers' matrices move along the orthogonalised momentum, everything else by AdamW.

The step is scaled to AdamW's usual size, 0.2 · sqrt(longer side) (Liu et al. 2025, arXiv:2502.16982), so learn.lr means
the same for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tidemill.learn.adam import Adam, stochastic_bfloat16

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that pulls singular values towards 1
SIZE = 0.2  # root mean square of AdamW's update
MOST_AT_ONCE = 1 << 27  # elements of the matrices made orthogonal together


@dataclass(frozen=True, slots=True)
class Moving:
    """A matrix, or this process's piece of one, with its gradient and its group."""

    p: Parameter
    grad: Tensor
    group: dict[str, Any]


class Muon(Adam):
    """Groups with `is_matrix` are Muon's; their momentum is float32, whatever AdamW's moments are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        matrices = []
        for group in self.param_groups:
            for p in group["params"]:
                grad = self.gradient(p)
                if grad is not None and group.get("is_matrix"):
                    matrices.append(Moving(p, grad, group))
                elif grad is not None:
                    self._step(p, grad, group)
        self._move_all(matrices)

    def _move_all(self, matrices: list[Moving]) -> None:
        """Matrices of one shape are made orthogonal together: each by itself would leave a device half idle."""
        alike: dict[Any, list[Moving]] = {}
        for one in matrices:
            alike.setdefault((one.p.shape, one.p.dtype, one.p.device), []).append(one)
        for (shape, *_), all_of in alike.items():
            at_once = max(1, MOST_AT_ONCE // math.prod(shape))
            for first in range(0, len(all_of), at_once):
                some = all_of[first : first + at_once]
                made = orthogonal(torch.stack([self._direction(one) for one in some]))
                for one, direction in zip(some, made):
                    self._move(one.p, direction, one.group, max(shape))

    def _direction(self, one: Moving) -> Tensor:
        """The momentum, one step ahead (Nesterov), in what Newton-Schulz is computed in: 16-bit weights cannot tell a
        finer step."""
        p, grad = one.p, one.grad.float()
        kept = self.state[p]
        if not kept:
            made = {"momentum": torch.zeros_like(p, dtype=torch.float32)}
            if self.master == "float32":
                made["master"] = p.detach().float().clone()
            kept.update(self._keep(p, made))
        kept["step"] += 1
        momentum = kept["momentum"].to(p.device, non_blocking=True)
        momentum.lerp_(grad, 1 - MOMENTUM)
        self._put_back(kept, {"momentum": momentum})
        return grad.lerp(momentum, MOMENTUM).to(torch.bfloat16 if p.dtype.itemsize == 2 else torch.float32)

    def _move(self, p: Parameter, direction: Tensor, group: dict[str, Any], longer_side: int) -> None:
        kept, rate = self.state[p], group["lr"] * SIZE * longer_side**0.5
        decay = 1 - group["lr"] * group["weight_decay"]
        seed = self._rounding(p, int(kept["step"]))
        if "master" not in kept and seed is None:
            p.mul_(decay).add_(direction.to(p.dtype), alpha=-rate)
            return
        weight = kept["master"].to(p.device, non_blocking=True) if "master" in kept else p.float()
        weight.mul_(decay).add_(direction, alpha=-rate)
        p.copy_(weight if seed is None else stochastic_bfloat16(weight, seed))
        if "master" in kept:
            self._put_back(kept, {"master": weight})


def orthogonal(x: Tensor) -> Tensor:
    """Near U Vᵀ of x = U S Vᵀ, by Newton-Schulz: singular values come to lie between about 0.7 and 1.2.

    x is a matrix, or a stack of them."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if is_tall else x).reshape(-1, *sorted(x.shape[-2:]))
    y = y / (torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True, dtype=torch.float32) + 1e-7).to(y.dtype)
    for _ in range(STEPS):
        square = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return (y.mT if is_tall else y).reshape(x.shape).contiguous()
