"""Running means and variances as buffers: they go wherever weights go, into checkpoints and to rollout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LEAST_VARIANCE = 1e-8
LIMIT = 10.0  # standard deviations; what is farther off counts as this far

Doubles = npt.NDArray[np.float64]


def moments(values: npt.NDArray[np.floating]) -> Doubles:
    """Count, sums and sums of squares of rows (n, width), in a form that adds up over fragments and ranks."""
    wide = values.astype(np.float64)
    return np.concatenate([[len(wide)], wide.sum(0), np.square(wide).sum(0)])


class Running(torch.nn.Module):
    """Mean and variance of everything absorbed so far; 0 and 1 before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.count: Tensor
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(width, dtype=torch.float64))

    def absorb(self, told: Doubles) -> None:
        """Add what `moments` gave (Chan et al. 1979)."""
        new, width = float(told[0]), len(self.mean)
        if not new:
            return
        sums, squares = torch.from_numpy(told[1 : 1 + width]), torch.from_numpy(told[1 + width :])
        mean, own = sums / new, float(self.count)
        spread = (squares - new * mean.square()).clamp(min=0.0)
        gap, all_of_them = mean - self.mean, own + new
        before = self.variance * own if own else torch.zeros_like(spread)
        self.variance.copy_((before + spread + gap.square() * own * new / all_of_them) / all_of_them)
        self.mean.add_(gap * new / all_of_them)
        self.count.fill_(all_of_them)

    @property
    def scale(self) -> Tensor:
        """1 / standard deviation."""
        return (self.variance + LEAST_VARIANCE).rsqrt()

    def forward(self, x: Tensor) -> Tensor:
        whitened: Tensor = (x - self.mean.to(x.dtype)) * self.scale.to(x.dtype)
        return whitened.clamp(-LIMIT, LIMIT)
