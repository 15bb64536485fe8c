"""A running mean of the weights, for evaluation: steadier than the weights themselves while they still jump about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

MEAN = "ema."  # before a parameter's name in a checkpoint: its running mean


def weights_of(tensors: Mapping[str, Tensor], raw: bool = False) -> tuple[dict[str, Tensor], bool]:
    """A checkpoint's weights by name, and whether they are running means: where those are kept, unless `raw`."""
    own = _named(tensors, "model.")
    means = {name: mean for name, mean in _named(tensors, MEAN).items() if name in own}
    return (own, False) if raw or not means else (own | means, True)


def adapters_of(tensors: Mapping[str, Tensor], raw: bool = False) -> tuple[dict[str, Tensor], bool]:
    """The same of its adapters."""
    own = _named(tensors, "adapter.")
    means = {name: mean.to(own[name].dtype) for name, mean in _named(tensors, MEAN).items() if name in own}
    return (own, False) if raw or not means else (own | means, True)


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


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
        return {f"{MEAN}{name}": mean for name, mean in self.means.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, mean in self.means.items():
            mean.copy_(tensors[f"{MEAN}{name}"])
