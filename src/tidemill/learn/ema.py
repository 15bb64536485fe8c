"""A running mean of the weights, for evaluation: steadier than the weights themselves while they still jump about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter


class Ema:
    """mean ← decay · mean + (1 − decay) · weight after every update, in float32: a bfloat16 mean would stand still."""

    def __init__(self, weights: Mapping[str, Parameter], decay: float) -> None:
        self.weights, self.decay = dict(weights), decay
        self.means = {name: p.detach().to(torch.float32, copy=True) for name, p in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, p in self.weights.items():
            self.means[name].lerp_(p.float(), 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The mean in the weights' place, and the weights back afterwards."""
        kept = {name: p.detach().clone() for name, p in self.weights.items()}
        self._place(self.means)
        try:
            yield
        finally:
            self._place(kept)

    @torch.no_grad()
    def _place(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self.weights.items():
            p.copy_(values[name])

    def state(self) -> dict[str, Tensor]:
        return {f"ema.{name}": mean for name, mean in self.means.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, mean in self.means.items():
            mean.copy_(tensors[f"ema.{name}"])
