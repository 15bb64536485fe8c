"""Muon (Jordan et al. 2024): the layers' matrices move along the orthogonalised momentum, everything else by AdamW.

The step is scaled to AdamW's usual size, 0.2 · sqrt(longer side) (Liu et al. 2025, arXiv:2502.16982), so learn.lr means
the same for both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tidemill.learn.adam import Adam

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that pulls singular values towards 1
SIZE = 0.2  # root mean square of AdamW's update


class Muon(Adam):
    """Groups with `is_matrix` are Muon's."""

    def _step(self, p: Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        if not group.get("is_matrix"):
            super()._step(p, grad, group)
            return
        self._move(p, orthogonal(self._direction(p, grad)), group, max(p.shape))

    def _direction(self, p: Parameter, grad: Tensor) -> Tensor:
        """The momentum, one step ahead (Nesterov)."""
        kept = self.state[p]
        if not kept:
            kept["momentum"] = torch.zeros_like(p, dtype=torch.float32)
        kept["momentum"].lerp_(grad, 1 - MOMENTUM)
        return grad.lerp(kept["momentum"], MOMENTUM)

    def _move(self, p: Parameter, direction: Tensor, group: dict[str, Any], longer_side: int) -> None:
        rate = group["lr"] * SIZE * longer_side**0.5
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction.to(p.dtype), alpha=-rate)


def orthogonal(x: Tensor) -> Tensor:
    """Near U Vᵀ of x = U S Vᵀ, by Newton-Schulz: singular values come to lie between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[0] > x.shape[1]
    y = x.T if is_tall else x
    y = y / (torch.linalg.vector_norm(y) + 1e-7)
    for _ in range(STEPS):
        square = y @ y.T
        y = a * y + (b * square + c * square @ square) @ y
    made: Tensor = y.T.contiguous() if is_tall else y
    return made
